"""Any role dies, at any time: the others reach the goal, the server stays whole, and equal faults give equal bits."""

from __future__ import annotations

import re
from typing import Literal

import pytest
import torch
from simulated_runs import check_sound, crew, different, engine, run_counting

from paceline import simulate
from paceline.config import discovery
from paceline.errors import Deadlock, RunError
from paceline.simulator.engine import SimulationEngine
from paceline.simulator.faults import Fault

GOAL = 8
AWAITS = range(1, 13)
SOME_AWAITS = (1, 2, 3, 4, 7, 12)
# every worker keeps the centre itself; where each has a model of its own, they need not agree
SERVERLESS = [
    name
    for name, found in discovery.schemes().items()
    if not found.value.methods and not found.value.alone and not found.value.decentralised
]
SELDOM = {"gosgd"}  # a worker that is cut off may have nothing to send in so few steps
PLACE = re.compile(r"worker:\d+ at \w+\.py:\d+ for ")


def killed_at(name: str, fault: Fault, **setting: object) -> SimulationEngine:
    """A run with that fault and some time to itself afterwards."""
    run = engine(name, faults=[fault], **setting)  # type: ignore[arg-type]
    run.run(GOAL)
    check_sound(run, GOAL)
    return run


def waits(run: SimulationEngine) -> str:
    """Whether updates wait for every living worker."""
    return run.scheme.waits or ("never" if run.scheme.asynchronous else "always")


def everybody(name: str) -> range:
    return range(crew(name))


def test_killed_at_any_await(name: str) -> None:
    """For good: the others neither hang nor find a torn server; all dead is an error, not a hang."""
    if crew(name) == 1:
        with pytest.raises(RunError, match="no worker is left alive"):
            engine(name, faults=[Fault("kill", 0, 1, "await")]).run(GOAL)
        return
    for rank in everybody(name):
        for k in AWAITS:
            run = killed_at(name, Fault("kill", rank, k, "await"))
            if run.seats[rank].awaits >= k:
                assert not run.seats[rank].worker.alive
                assert not run.seats[rank].driver.running


def test_killed_at_any_await_and_back(name: str) -> None:
    """With `back` it takes part again, from its cells."""
    for rank in everybody(name):
        for k in SOME_AWAITS:
            run = killed_at(name, Fault("kill", rank, k, "await", duration=0.7))
            if run.seats[rank].awaits >= k:
                run.run(park_at=max(seat.worker.t for seat in run.seats) + 3)
                assert run.seats[rank].worker.alive
                # where nobody waits for it, the others may have ended, and it takes over where they are
                assert run.seats[rank].awaits > k or run.scheme.decentralised


@pytest.mark.parametrize("shrink", [True, False])
def test_killed_at_any_moment_on_a_slow_network_and_back(name: str, shrink: bool) -> None:
    """Messages are under way at every moment: calls, answers, means."""
    for rank in everybody(name):
        for k in range(8):
            killed_at(name, Fault("kill", rank, 0.47 * k, duration=1.3), network="latency=0.3", shrink=shrink)


def test_killed_at_any_step(name: str) -> None:
    for rank in everybody(name):
        for k in range(3):
            killed_at(name, Fault("kill", rank, k, "step", duration=2.0))
            if crew(name) > 1:
                killed_at(name, Fault("kill", rank, k, "step"))


def test_all_but_one_die(team: str) -> None:
    """One after the other, until one is left, and then they come back."""
    deaths = [Fault("kill", rank, 1.0 + rank) for rank in (0, 1)]
    run = engine(team, faults=deaths)
    run.run(GOAL)
    check_sound(run, GOAL)
    assert [seat.worker.alive for seat in run.seats] == [False, False, True]
    run.injector.restart(0)
    run.injector.restart(1)
    run.run(GOAL + 12)
    check_sound(run, GOAL + 12)


def test_everybody_dies_and_comes_back(name: str) -> None:
    faults = [Fault("kill", rank, 1.0 + 0.1 * rank, duration=2.0) for rank in everybody(name)]
    run = engine(name, faults=faults)
    run.run(GOAL)
    check_sound(run, GOAL)
    assert run.now > 3.0


@pytest.mark.parametrize("action", ["stop", "partition"])
def test_held_up_for_a_while(name: str, action: Literal["stop", "partition"]) -> None:
    """A slow or cut-off worker holds up those who wait for it, and nobody else."""
    for rank in everybody(name):
        for fault in (
            Fault(action, rank, 0.5, duration=1000.0),
            Fault(action, rank, 1, "step", duration=1000.0),
            Fault(action, rank, 2, "await", duration=1000.0),
        ):
            run = killed_at(name, fault, network="latency=0.1")
            sends_nothing = crew(name) == 1 and run.scheduler is None and action == "partition"
            if name in SELDOM and action == "partition":
                continue
            if crew(name) == 1 or waits(run) == "always":
                assert (run.now >= 1000.0) != sends_nothing
            elif waits(run) == "never":
                assert run.now < 1000.0
            assert all(seat.worker.alive for seat in run.seats)


FAULTS = [
    [Fault("kill", 1, 3, "await")],
    [Fault("kill", 0, 2.0, duration=1.5), Fault("kill", 1, 2.1, duration=0.5)],
    [Fault("stop", 0, 1.0, duration=4.0), Fault("partition", 1, 2.0, duration=3.0)],
    [Fault("kill", 1, 1, "step"), Fault("restart", 1, 6.0), Fault("partition", 0, 4, "await", 2.0)],
]


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_the_same_faults_give_the_same_bits(name: str, number: int) -> None:
    faults = [fault for fault in FAULTS[number] if fault.rank < crew(name)]
    first, second = (engine(name, faults=faults, network="latency=0.05") for _ in range(2))
    assert run_counting(first, GOAL) == run_counting(second, GOAL)
    assert different(first, second) == []
    check_sound(first, GOAL)


def test_who_waits_for_the_dead_is_told_so(team: str) -> None:
    """With quorum=hold a barrier stays as it was: a report of who waits where, instead of a hang."""
    for rank in everybody(team):
        for k in (1, 3, 6):
            run = engine(team, faults=[Fault("kill", rank, k, "await")], shrink=False)
            if waits(run) != "always" or run.scheme.asynchronous:
                try:
                    run.run(GOAL)
                except Deadlock as error:
                    check_report(str(error), run)
                continue
            with pytest.raises(Deadlock) as caught:
                run.run(100)
            check_report(str(caught.value), run)
            assert f"dead: worker {rank}" in str(caught.value)


def check_report(text: str, run: SimulationEngine) -> None:
    waiting = [seat for seat in run.seats if seat.worker.alive]
    assert len(PLACE.findall(text)) == len(waiting)
    assert text.count("guard '") + text.count("mean: ") + text.count("meeting: ") == len(waiting)


def test_a_held_quorum_goes_on_when_the_dead_comes_back(name: str) -> None:
    for rank in everybody(name):
        for k in SOME_AWAITS:
            killed_at(name, Fault("kill", rank, k, "await", duration=3.0), shrink=False)


@pytest.mark.parametrize("shrink", [True, False])
@pytest.mark.parametrize("serverless", SERVERLESS)
def test_replicas_agree_after_a_return(serverless: str, shrink: bool) -> None:
    """Where everybody keeps the centre itself, who comes back has the others' centre, bit for bit."""
    for k in range(24):
        fault = Fault("kill", 1, 1.0 + 0.13 * k, duration=2.0)
        run = engine(serverless, faults=[fault], network="latency=0.3", shrink=shrink)
        run.run(GOAL)
        run.run(park_at=max(seat.worker.t for seat in run.seats) + 2)
        models = [run.scheme.model(seat.worker.state) for seat in run.seats]
        assert all(torch.equal(models[0], model) for model in models[1:]), f"death at {fault.when:.2f}"
        assert len({seat.worker.v for seat in run.seats}) == 1


@pytest.mark.parametrize("quorum", ["shrink", "hold"])
def test_a_worker_that_dies_with_a_token_takes_none_away(quorum: Literal["shrink", "hold"]) -> None:
    """Tokens are counted per worker: one that is restarted still has the token that it died with."""
    for k in range(1, 14):
        fault = Fault("kill", 1, k, "await", duration=2.5)
        result = simulate(
            *("toy", "sync-repeat"),
            workers=3,
            steps=12,
            lr=0.01,
            compute="exponential:1",
            faults=[fault],
            quorum=quorum,
            aggregate=5,
        )
        assert (result.updates, result.staleness.histogram) == (12, {0: 60})
