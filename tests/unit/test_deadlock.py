"""What the simulator says when nothing can go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from machine import Logging, engine, line_of, push_once, scheme_with

from paceline import simulate
from paceline.errors import Deadlock, RunError, SchemeError
from paceline.scheme import Scheme, State, Vector, on_server
from paceline.simulator.faults import Fault
from paceline.tasks.quadratic import quadratic
from paceline.worker import Worker


def test_a_deadlock_names_everybodys_line_and_guard() -> None:
    async def step(self: Any, w: Worker) -> None:
        g = await w.grad()
        await self.push(g, w.rank)
        if w.rank:
            await self.wait(7)  # waits here
        pending = await w.start(self.never())
        await pending  # waits for a pending

    with pytest.raises(Deadlock) as caught:
        engine(scheme_with(step), workers=3).run(10)
    text = str(caught.value)
    assert "deadlock at 1 s, after 3 updates: every living worker waits" in text
    place = line_of("waits for a pending", __file__)
    assert f"worker:0 at {place} for never(): guard 's.v > 100' is false with v = 3" in text
    for rank in (1, 2):
        place = line_of("waits here", __file__)
        assert f"worker:{rank} at {place} for wait(r=7): guard 's.open >= r' is false with open = 0" in text


def test_a_deadlock_at_a_mean_names_who_is_missing() -> None:
    @dataclass(frozen=True)
    class Lonely(Logging, name="lonely"):
        async def step(self, w: Worker) -> None:
            if w.rank == 1:
                await self.never()
            await w.mean(w.x)  # the mean

    with pytest.raises(Deadlock) as caught:
        engine(Lonely(), workers=3).run(1)
    place = line_of("the mean", __file__)
    assert f"worker:0 at {place} for mean: 2 of 3 have arrived, missing worker 1" in str(caught.value)


def test_a_deadlock_carries_what_was_reached() -> None:
    async def step(self: Any, w: Worker) -> None:
        g = await w.grad()
        await self.push(g, 0)
        await self.never()

    with pytest.raises(Deadlock) as caught:
        simulate(quadratic(), scheme_with(step), workers=2, steps=10)
    result = caught.value.result
    assert result is not None
    assert (result.updates, result.gradients, result.metrics) == (2, 2, {})


def test_all_dead_is_an_error() -> None:
    faults = [Fault("kill", 0, 1.5), Fault("kill", 1, 2.5)]
    with pytest.raises(RunError, match=r"no worker is left alive at 2\.5 s, after 3 updates") as caught:
        engine(scheme_with(push_once), faults=faults).run(10)
    assert not isinstance(caught.value, Deadlock)


def test_a_scheme_that_never_pushes_is_told_so() -> None:
    async def step(self: Any, w: Worker) -> None:
        await w.sleep(1)

    with pytest.raises(RunError, match="events without a change of the centre: nothing is ever pushed"):
        engine(scheme_with(step), workers=1).run(10)


def test_a_step_without_an_await_is_refused() -> None:
    async def step(self: Any, w: Worker) -> None: ...

    with pytest.raises(SchemeError, match=r"worker:0, step 0: step\(\) ended without awaiting anything"):
        engine(scheme_with(step)).run(1)


def test_a_scheme_without_a_step_is_refused() -> None:
    @dataclass(frozen=True)
    class Stepless(Scheme, name="stepless"): ...

    with pytest.raises(SchemeError, match=r"Stepless has no step\(\)"):
        engine(Stepless()).run(1)


def test_guards_are_not_asked_more_often_with_more_waiting() -> None:
    """What an event costs does not depend on how many wait: counted in evaluations of the guard."""
    counts = []
    for workers in (10, 100):
        asked: list[int] = []

        @dataclass(frozen=True)
        class Barrier(Scheme, name="barrier"):
            def server(self, x0: Vector, workers: int) -> State:
                return State(x=x0, got=0, workers=workers)

            @on_server(when=lambda self, s, r, asked=asked: asked.append(r) or s.v >= r)
            def pull(self, s: State, r: int) -> Vector:
                x: Vector = s.x
                return x

            @on_server
            def push(self, s: State, g: Vector) -> None:
                s.got += 1
                if s.got == s.workers:
                    s.got = 0
                    s.x -= 0.1 * g
                    s.v += 1

            async def step(self, w: Worker) -> None:
                w.x = await self.pull(w.t)
                g = await w.grad()
                await self.push(g)

        run = engine(Barrier(), workers=workers)
        run.run(5)
        counts.append(len(asked) - workers)  # the first pulls do not wait: each asks for itself
    assert counts[0] == counts[1] <= 15
