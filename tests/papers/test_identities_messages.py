"""Schemes whose messages nobody waits for: GoSGD (arXiv 1804.01852) and AD-PSGD (1710.06952) with `partner=any-step`.
Identity 30, what sending and receiving conserves at every moment, and how much is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import SEED, bowl, descent, network
from torch import Tensor

from paceline import Task
from paceline.compute_times import parse_times
from paceline.config.build import scheme_of
from paceline.runtime.messages import under_way
from paceline.simulator.cost import Cost, parse_link
from paceline.simulator.engine import SimulationEngine
from paceline.simulator.faults import Fault

LR, SLOW = 0.05, "latency=0.7,bandwidth=1000"
FAULTS = [Fault("kill", 1, 5.3, duration=4.0), Fault("partition", 0, 9.0, duration=3.0), Fault("kill", 0, 14.2)]
FAULTS += [Fault("kill", 2, await_, "await", duration=1.0) for await_ in range(20, 40)]


def held(task: Task, name: str, workers: int, *, faults: Any = (), network: str = "", **hyper: Any) -> SimulationEngine:
    cost = Cost(parse_times("exponential:1"), parse_link(network), speeds=(1.0, 1.0, 0.4, *[1.0] * (workers - 3)))
    scheme = scheme_of(name, {"partner": "any-step", **hyper})
    return SimulationEngine(task, scheme, workers=workers, seed=SEED, cost=cost, faults=faults)


def scattered(run: SimulationEngine) -> Tensor:
    """Put the workers at places of their own; gives the places, a row each."""
    generator = torch.Generator().manual_seed(3)
    for seat in run.seats:
        seat.worker.x = torch.randint(-1000, 1000, (23,), generator=generator).double()
    return places(run)


def places(run: SimulationEngine) -> Tensor:
    return torch.stack([seat.worker.x for seat in run.seats])


@pytest.mark.parametrize("make", [bowl, lambda: network(torch.float32)], ids=["quadratic", "network in single"])
def test_gosgd_that_never_sends_is_independent_sgd_bit_for_bit(make: Callable[[], Task]) -> None:
    run = held(make(), "gosgd", 3, lr=LR, p=0.0)
    run.run(20)
    for rank, seat in enumerate(run.seats):
        assert seat.worker.x.equal(descent(make(), 20, LR, rank, 3)), f"worker {rank}"


@pytest.mark.parametrize("name", ["gosgd", "ad-psgd"])
def test_one_worker_is_sgd_bit_for_bit(name: str) -> None:
    cost, scheme = Cost(), scheme_of(name, {"partner": "any-step", "lr": LR})
    run = SimulationEngine(network(), scheme, workers=1, seed=SEED, cost=cost)
    run.run(20)
    assert run.seats[0].worker.x.equal(descent(network(), 20, LR))


@pytest.mark.parametrize("faults", [(), FAULTS], ids=["no faults", "faults"])
@pytest.mark.parametrize("network", ["", SLOW], ids=["free", "slow"])
@pytest.mark.parametrize("p", [0.2, 1.0])
def test_gosgd_conserves_weights_and_what_they_weigh(p: float, network: str, faults: list[Fault]) -> None:
    """With what is under way, at any moment between two steps of all, also if workers are killed inside a step."""
    run = held(bowl(), "gosgd", 5, lr=0.0, p=p, network=network, faults=faults)
    before, seen = scattered(run), 0
    for steps in range(1, 25):
        run.run(park_at=steps)
        states = [seat.worker.state for seat in run.seats]
        messages = [message for _, message in under_way(states)]
        seen += len(messages)
        assert sum(s.weight for s in states) + sum(m.number for m in messages) == 5  # halves of halves are exact so far
        weighed = sum([s.weight * s.x for s in states] + [m.number * m.v for m in messages])
        torch.testing.assert_close(weighed, before.sum(0), rtol=0.0, atol=1e-8)
    assert seen
    assert (places(run) - places(run).mean(0)).norm() < 0.9 * (before - before.mean(0)).norm()


@pytest.mark.parametrize("faults", [(), FAULTS], ids=["no faults", "faults"])
@pytest.mark.parametrize("network", ["", SLOW], ids=["free", "slow"])
@pytest.mark.parametrize("pairs", ["random", "bipartite"])
def test_ad_psgd_conserves_the_sum_of_all_models(pairs: str, network: str, faults: list[Fault]) -> None:
    run = held(bowl(), "ad-psgd", 5, lr=0.0, pairs=pairs, network=network, faults=faults)
    before = scattered(run)
    for steps in range(1, 40):
        run.run(park_at=steps)
        states = [seat.worker.state for seat in run.seats]
        answers = [message.v for _, message in under_way(states) if message.number]
        torch.testing.assert_close(sum([s.x for s in states] + answers), before.sum(0), rtol=0.0, atol=1e-8)
    living = places(run)[[seat.worker.rank for seat in run.seats if seat.worker.alive]]
    assert (living - living.mean(0)).norm() < 0.1 * (before - before.mean(0)).norm()


def test_a_worker_of_ad_psgd_asks_another_one_if_the_first_does_not_answer() -> None:
    """Worker 1 is frozen with a question in its mailbox: the others go on to exchange."""
    run = held(bowl(), "ad-psgd", 3, lr=0.0, faults=[Fault("stop", 1, 0.5, duration=10_000.0)])
    before = scattered(run)
    run.run(seconds=400.0)
    here = places(run)
    assert (here[0] - here[2]).norm() < 1e-3 * (before[0] - before[2]).norm()
    assert here[1].equal(before[1])


@pytest.mark.parametrize(
    ("name", "hyper", "least", "most"), [("gosgd", {"p": 0.25}, 0.2, 0.26), ("ad-psgd", {}, 0.3, 1.0)]
)
def test_bytes_that_are_sent_are_received_or_under_way(
    name: str, hyper: dict[str, Any], least: float, most: float
) -> None:
    run = held(bowl(), name, 8, lr=LR, network=SLOW, **hyper)
    run.run(200)
    traffic, size = [seat.driver.traffic for seat in run.seats], 23 * 8
    states = [seat.worker.state for seat in run.seats]
    sent, received = sum(one.sent for one in traffic), sum(one.received for one in traffic)
    assert sent - received == len(under_way(states)) * size
    steps = sum(seat.worker.t for seat in run.seats)
    assert least < sent / size / steps < most


def test_a_slow_worker_does_not_hold_the_others_up() -> None:
    """With same-step the others wait for the slowest of each pair; with any-step they make their own steps."""
    seconds = {}
    for partner in ("same-step", "any-step"):
        cost = Cost(parse_times("constant:1"), speeds=(1.0, 1.0, 1.0, 0.1))
        run = SimulationEngine(
            bowl(), scheme_of("ad-psgd", {"partner": partner, "lr": LR}), workers=4, seed=SEED, cost=cost
        )
        run.run(seconds=100.0)
        seconds[partner] = [seat.worker.t for seat in run.seats]
    assert seconds["same-step"] == [*[pytest.approx(10, abs=2)] * 3, 10]
    assert seconds["any-step"] == [*[pytest.approx(100, abs=1)] * 3, 10]
