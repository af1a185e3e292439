"""Death, return and delay of simulated workers."""

from __future__ import annotations

from typing import Any

import pytest
from machine import engine, got, log, means, push_once, scheme_with

from paceline import simulate
from paceline.errors import Deadlock, RunError
from paceline.simulator.faults import Fault
from paceline.worker import Worker


def test_locals_do_not_survive_a_crash_but_cells_do() -> None:
    """The trap: after a restart the step begins anew, with the worker's cells and the count of its steps."""
    entries = []

    async def step(self: Any, w: Worker) -> None:
        w.begun += 1
        entries.append((w.t, w.begun, w.done))
        mine = await w.grad()
        w.done += 1
        await self.push(mine, w.rank)

    death = Fault("kill", 0, 4, "await", duration=5.0)  # at its second push
    run = engine(scheme_with(step), workers=1, faults=[death])
    run.run(3)
    assert entries == [(0, 1, 0), (1, 2, 1), (1, 3, 2), (2, 4, 3)]
    assert run.now == 2.0 + 5.0 + 2.0
    assert run.seats[0].worker.begun == 4


def test_a_message_under_way_dies_with_its_sender() -> None:
    death = Fault("kill", 0, 1.05, duration=10.0)
    run = engine(scheme_with(push_once), workers=1, network="latency=0.1", faults=[death])
    run.run(1)
    assert run.now == pytest.approx(1.05 + 10 + 1 + 0.1)


def test_faults_at_a_time_a_step_and_an_await() -> None:
    for fault, moment in (
        (Fault("kill", 1, 2.25), 2.25),
        (Fault("kill", 1, 3, "step"), 3.0),
        (Fault("kill", 1, 5, "await"), 2.0),  # two awaits a step: the fifth is the third gradient
        (Fault("kill", 1, 6, "await"), 3.0),
    ):
        run = engine(scheme_with(push_once), faults=[fault])
        run.run(9)
        assert not run.seats[1].worker.alive
        assert log(run).count(1) == int(moment) - (fault.unit == "await" and fault.when == 6), fault


def test_faults_of_different_units_do_not_wait_for_each_other() -> None:
    faults = [Fault("kill", 0, 50, "step"), Fault("kill", 0, 60, "await", 7.0)]  # await 60 is in step 29
    run = engine(scheme_with(push_once), workers=1, faults=faults)
    with pytest.raises(RunError, match="no worker is left alive at 58 s, after 50 updates"):
        run.run(60)


def test_a_partition_holds_messages_but_not_computing() -> None:
    times: list[float] = []

    async def step(self: Any, w: Worker) -> None:
        g = await w.grad()
        if w.rank == 1:
            times.append(run.now)
        await self.push(g, w.rank)

    run = engine(scheme_with(step), faults=[Fault("partition", 1, 0.5, duration=4.0)])
    run.run(9)
    assert log(run) == [0, 0, 0, 0, 1, 0, 1, 0, 1]  # rank 1's push of 1.0 arrives at 4.5, the next at 5.5
    assert times[:2] == [1.0, 5.5]


def test_a_stop_holds_everything() -> None:
    times: list[float] = []

    async def step(self: Any, w: Worker) -> None:
        g = await w.grad()
        if w.rank == 1:
            times.append(run.now)
        await self.push(g, w.rank)

    run = engine(scheme_with(step), faults=[Fault("stop", 1, 0.5, duration=4.0)])
    run.run(9)
    assert times[:2] == [4.5, 5.5]


def test_dead_workers_are_not_waited_for_unless_the_quorum_holds() -> None:
    run = engine(means(), workers=3, faults=[Fault("kill", 1, 0.5)])
    run.run(park_at=1)
    assert [got(run)[rank] for rank in (0, 2)] == [2.0, 2.0]
    held = engine(means(), workers=3, faults=[Fault("kill", 1, 0.5)], shrink=False)
    with pytest.raises(Deadlock, match="missing worker 1"):
        held.run(1)


def test_the_chiefs_deputy_keeps_the_centre() -> None:
    """Without a server the centre is the chief's; when it dies, the next one's."""
    run = engine(means(), workers=3, faults=[Fault("kill", 0, 2, "step")])
    run.run(5)
    assert run.updates == 5
    assert run.centre is run.seats[1].worker.state


def test_a_parked_worker_that_dies_and_returns_begins_once() -> None:
    run = engine(scheme_with(push_once), workers=2)
    run.run(park_at=2)
    run.injector.kill(1)
    run.injector.restart(1)
    run.run(8)
    assert log(run) == [0, 1, 0, 1, 0, 1, 0, 1]


def test_killing_the_dead_and_waking_the_living_is_nothing() -> None:
    run = engine(scheme_with(push_once), workers=2)
    run.run(2)
    run.injector.restart(1)
    run.injector.kill(1)
    run.injector.kill(1)
    run.run(6)
    assert log(run).count(1) == 1
    assert run.seats[1].generation == 1


def test_the_count_of_updates_never_falls_when_the_chief_dies() -> None:
    """Its deputy may not have the last mean yet."""
    slow = {"workers": 3, "steps": 10, "network": "latency=0.3"}
    result = simulate("toy", "allreduce", links=["0:latency=0"], faults=["kill:0@update=5"], every=1, **slow)
    seen = [point.update for point in result.history]
    assert seen == sorted(set(seen))
    assert simulate("toy", "easgd", faults=["kill:0@update=10"], **slow).updates == 10
