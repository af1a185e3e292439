"""The order of events, and operations that overlap."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from machine import Logging, engine, log, push_once, scheme_with

from paceline.errors import SchemeError
from paceline.scheme import Scheme, State, Vector, on_server
from paceline.simulator.faults import Fault
from paceline.worker import Worker


def test_equal_times_are_settled_by_rank() -> None:
    run = engine(scheme_with(push_once), workers=4)
    run.run(12)
    assert log(run) == [0, 1, 2, 3] * 3
    assert run.now == 3.0


def test_earlier_comes_first_whatever_the_rank() -> None:
    run = engine(scheme_with(push_once), workers=3, speeds=(1.0, 1.25, 2.0))
    run.run(6)
    assert log(run) == [2, 1, 0, 2, 2, 1]  # at 0.5, 0.8, 1.0, 1.0, 1.5, 1.6: rank 0 before rank 2


def test_equal_times_of_one_worker_keep_their_order() -> None:
    async def step(self: Any, w: Worker) -> None:
        g = await w.grad()
        pending = [await w.start(self.push(g, k)) for k in range(5)]
        for one in pending:
            await one

    run = engine(scheme_with(step), workers=1)
    run.run(10)
    assert log(run) == [0, 1, 2, 3, 4] * 2


def test_a_stop_in_time_does_not_reorder_what_comes_at_one_moment() -> None:
    async def step(self: Any, w: Worker) -> None:
        g = await w.grad()
        pending = [await w.start(self.push(g, k)) for k in range(4)]
        for one in pending:
            await one

    whole, halted = (engine(scheme_with(step), network="latency=0.5") for _ in range(2))
    whole.run(24)
    for k in range(1, 60):
        halted.run(24, seconds=0.25 * k)
    assert log(whole) == log(halted)
    assert whole.now == halted.now


def test_what_is_held_back_keeps_its_order() -> None:
    """Messages of different moments, all released at one: first sent, first delivered."""

    async def step(self: Any, w: Worker) -> None:
        pending = []
        for k in range(8):
            g = await w.grad()
            pending.append(await w.start(self.push(g, k)))
        for one in pending:
            await one

    cut = Fault("partition", 0, 0.0, duration=2.7182818)
    run = engine(scheme_with(step), workers=1, compute="constant:0.1", faults=[cut])
    run.run(8)
    assert log(run) == list(range(8))
    assert run.now == 2.7182818


def test_a_started_call_overlaps_with_computing() -> None:
    async def overlapped(self: Any, w: Worker) -> None:
        g = await w.grad()
        pending = await w.start(self.push(g, 0))
        await w.grad()
        await pending

    async def in_turn(self: Any, w: Worker) -> None:
        g = await w.grad()
        await self.push(g, 0)
        await w.grad()

    seconds = {}
    for step in (overlapped, in_turn):
        run = engine(scheme_with(step), workers=1, network="latency=0.4")
        run.run(5)
        seconds[step.__name__] = run.now
    assert seconds["in_turn"] == pytest.approx(4 * 2.8 + 1.4)
    assert seconds["overlapped"] == pytest.approx(4 * 2.0 + 1.4)


def test_arguments_are_copied_when_started() -> None:
    async def step(self: Any, w: Worker) -> None:
        await w.grad()
        w.x = 1
        pending = await w.start(self.push(w.x, 0))
        gradient = await w.start(w.grad(w.x))
        mean = await w.start(w.mean(w.x))
        w.x = 100
        await pending
        assert (await gradient).tolist() == [1.0] * 4  # of the quadratic: x itself
        assert (await mean).tolist() == [1.0] * 4
        w.done += 1

    run = engine(scheme_with(step), workers=1, network="latency=0.5")
    start = run.centre.x.clone()
    run.run(2)
    assert run.seats[0].worker.done == 1
    assert torch.allclose(run.centre.x, start - 0.2)


def test_nested_arguments_are_copied_when_started() -> None:
    @dataclass(frozen=True)
    class Pairs(Scheme, name="pairs"):
        @on_server
        def push(self, s: State, both: tuple[Vector, Vector]) -> None:
            s.x = both[0] + both[1]
            s.v += 1

        async def step(self, w: Worker) -> None:
            w.x = 1
            pending = await w.start(self.push((w.x, w.x)))
            w.x = 100
            await w.grad()
            await pending

    run = engine(Pairs(), workers=1)
    run.run(1)
    assert run.centre.x.tolist() == [2.0] * 4


def test_a_pending_that_is_done_costs_no_time() -> None:
    times = []

    async def step(self: Any, w: Worker) -> None:
        pending = await w.start(w.grad())
        await w.sleep(5.0)
        g = await pending
        again = await pending
        assert g is again
        times.append(run.now)
        await self.push(g, 0)

    run = engine(scheme_with(step), workers=1)
    run.run(2)
    assert times == [5.0, 10.0]


def test_sleep_takes_its_time_and_no_more() -> None:
    async def step(self: Any, w: Worker) -> None:
        await w.sleep(0)
        await w.sleep(2.5)
        await self.push(w.x, 0)

    run = engine(scheme_with(step), workers=1)
    run.run(2)
    assert run.now == 5.0


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
def test_nobody_sleeps_backwards_or_for_ever(seconds: float) -> None:
    async def step(self: Any, w: Worker) -> None:
        await w.sleep(seconds)

    with pytest.raises(SchemeError, match="give a finite number, at least 0"):
        engine(scheme_with(step)).run(1)


def test_an_operation_that_cannot_be_started() -> None:
    async def step(self: Any, w: Worker) -> None:
        await w.start(await w.start(w.sleep(1)))

    with pytest.raises(SchemeError, match="Pending, which cannot be started"):
        engine(scheme_with(step)).run(1)


def test_a_call_of_another_scheme_is_refused() -> None:
    async def step(self: Any, w: Worker) -> None:
        await Logging().pull()
        await Other().pull()

    @dataclass(frozen=True)
    class Other(Scheme, name="other"):
        @on_server
        def pull(self, s: State) -> None: ...

    with pytest.raises(SchemeError, match=r"worker:0 called pull\(\), which is not a method of its own scheme"):
        engine(scheme_with(step)).run(1)
