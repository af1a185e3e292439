"""Compressed messages in virtual time: what was left out of a message reaches its receiver later, and nobody else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import State, Vector, Worker, simulate
from paceline.config import build
from paceline.errors import UsageError
from paceline.ops import nbytes
from paceline.runtime.messages import ARRIVAL, SEQUENCE, under_way
from paceline.sampling import mixed
from paceline.scheme import Scheme
from paceline.simulator.cost import Cost, NetworkLink, parse_link
from paceline.simulator.engine import SimulationEngine
from paceline.simulator.faults import Fault
from paceline.tasks.quadratic import quadratic

WORKERS, DIM = 4, 24
ANY = {"partner": "any-step"}
SLOW = "latency=0.7,bandwidth=400"
FAULTS = [Fault("kill", 1, 5.3, duration=4.0), *[Fault("kill", 2, n, "await", duration=1.0) for n in range(20, 30)]]


@dataclass(frozen=True)
class Telling(Scheme, name="telling"):
    """Every worker sends its gradient to a random other one, and keeps the sums of what it has given to each worker and
    taken from each."""

    decentralised = True
    compresses = ("send",)

    def sends_messages(self) -> bool:
        return True

    def worker(self, x0: Vector, workers: int) -> State:
        rows = x0.new_zeros(workers, x0.numel())
        return State(x=x0, given=rows, taken=rows.clone(), refused=0)

    async def step(self, w: Worker) -> None:
        for message in await w.receive():
            w.taken[message.sender] += message.v
        g = await w.grad()
        to = (w.rank + 1 + mixed(w.seed, w.rank, w.t) % (w.workers - 1)) % w.workers
        if await w.send(to, g):
            w.given[to] += g
        else:
            w.refused += 1
        w.x -= 0.01 * g
        w.v += 1


def engine(scheme: Scheme, compress: str, network: str = "", faults: Any = ()) -> SimulationEngine:
    task, link = quadratic(dim=DIM, noise=0.3), parse_link(network) if network else NetworkLink()
    made = build.compressing(scheme, compress)
    return SimulationEngine(task, made, workers=WORKERS, seed=3, cost=Cost(network=link), faults=faults)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("faults", [(), FAULTS], ids=["no faults", "faults"])
@pytest.mark.parametrize("network", ["", "latency=3"], ids=["free", "slow"])
@pytest.mark.parametrize(
    "compress", ["topk:0.1", "ef-sign", "onebit", "randk:fraction=0.2,feedback=true", "int8:feedback=true"]
)
def test_what_was_given_to_a_worker_is_there_under_way_or_kept_for_it(compress: str, network: str, faults: Any) -> None:
    """At every moment between two steps, for each pair of workers, also if some are killed inside a step."""
    run = engine(Telling(), compress, network, faults)
    kept = 0.0
    for steps in range(1, 16):
        run.run(park_at=steps)
        states = [seat.worker.state for seat in run.seats]
        flying = [[torch.zeros(DIM, dtype=states[0].x.dtype) for _ in states] for _ in states]
        for to, message in under_way(states):
            flying[message.sender][to] += message.v
        for sender, state in enumerate(states):
            errors: Tensor = state.cell("compress_send_error")
            for to in range(WORKERS):
                there = states[to].taken[sender] + flying[sender][to] + errors[to]
                torch.testing.assert_close(there, state.given[to], rtol=0.0, atol=1e-4)
                kept += float(errors[to].norm())
    assert kept > 0
    if network:
        assert sum(seat.worker.state.refused for seat in run.seats)


@pytest.mark.parametrize("faults", [(), FAULTS], ids=["no faults", "faults"])
@pytest.mark.parametrize("compress", ["int8", "fp8", "bf16", "qsgd:127"])
def test_models_that_are_sent_conserve_what_they_did(compress: str, faults: Any) -> None:
    """gosgd: the weights, and weight times model. ad-psgd: the sum of all models, with answers under way."""
    for name in ("gosgd", "ad-psgd"):
        hyper = {"lr": 0.0} | ANY | ({"p": 0.8} if name == "gosgd" else {})
        run = engine(build.scheme_of(name, hyper), compress, SLOW, faults)
        generator = torch.Generator().manual_seed(3)
        for seat in run.seats:
            seat.worker.x = torch.randn(DIM, generator=generator, dtype=seat.worker.x.dtype)
        before = torch.stack([seat.worker.x for seat in run.seats]).sum(0)
        for steps in range(1, 20):
            run.run(park_at=steps)
            states = [seat.worker.state for seat in run.seats]
            messages = [message for _, message in under_way(states)]
            if name == "gosgd":
                total = sum([s.weight * s.x for s in states] + [m.number * m.v for m in messages])
            else:
                total = sum([s.x for s in states] + [m.v for m in messages if m.number == 1.0])
            torch.testing.assert_close(total, before, rtol=0.0, atol=1e-4)
        spread = torch.stack([seat.worker.x for seat in run.seats])
        assert (spread - spread.mean(0)).norm() < 0.9 * before.norm() * WORKERS


@pytest.mark.parametrize("compress", ["none", "int8", "bf16", "topk:0.1"])
def test_the_network_and_the_counts_see_the_smaller_size(compress: str) -> None:
    """One message on idle links takes the time of its payload twice: out of its sender, and into its receiver."""
    scheme = Telling()
    run = engine(scheme, compress, SLOW)
    run.run(park_at=1)
    made = build.compressing(scheme, compress)
    size = nbytes(run.seats[0].worker.x)
    if made.compressor is not None:
        state = State(**made.compressor.cells(run.seats[0].worker.x), workers=WORKERS)
        size = nbytes(made.compressor.encode(state, run.seats[0].worker.x, 0))
    assert [seat.driver.traffic.sent for seat in run.seats] == [size] * WORKERS
    numbers = [seat.worker.state.cell("message_numbers") for seat in run.seats]
    heads = [seat.worker.state.cell("message_heads") for seat in run.seats]
    times = [float(n[slot, ARRIVAL]) for n, h in zip(numbers, heads, strict=True) for slot in h[:, SEQUENCE].nonzero()]
    first = 2 * (0.7 + size / 400)
    assert min(times) - 1.0 == pytest.approx(first)  # a gradient takes a second
    run.run(park_at=12)
    taken = sum(int(one) for seat in run.seats for one in (seat.worker.state.cell("message_taken")[:, SEQUENCE] > 0))
    assert taken
    assert sum(seat.driver.traffic.received for seat in run.seats) % size == 0


def test_an_uncompressed_size_is_told_beside_the_sent_one() -> None:
    told = simulate("quadratic", "gosgd", workers=3, steps=20, compress="int8", p=1.0, **ANY).traffic
    plain = simulate("quadratic", "gosgd", workers=3, steps=20, p=1.0, **ANY).traffic
    assert told["uncompressed"] == plain["uncompressed"] == plain["sent"]
    assert 0 < sum(told["sent"]) < 0.5 * sum(plain["sent"])


@dataclass(frozen=True)
class Silent(Telling, name="silent"):
    compresses = ()


@pytest.mark.parametrize(
    ("scheme", "compress", "why"),
    [
        (Silent(), "int8", "silent does not say that its messages can be compressed; omit --compress int8"),
        (build.scheme_of("gosgd", ANY), "topk:0.1", "it would damage models"),
        (build.scheme_of("ad-psgd", ANY), "int8:feedback=true", "it would damage models"),
    ],
)
def test_what_would_be_damaged_is_refused(scheme: Scheme, compress: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        build.compressing(scheme, compress)
