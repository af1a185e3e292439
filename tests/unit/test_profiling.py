"""`--profile` replaces methods of the parts of a role; without it no part is touched."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hook_session import FakeSession
from memory_fixture import Theatre

from paceline.config import build
from paceline.hooks.profiler import Profiler
from paceline.processes.memory.board import TIMES
from paceline.processes.roles import profiling
from paceline.processes.roles.control_channel import Control
from paceline.processes.roles.profiling import NOT_PROFILED, NotProfiled, Profiled
from paceline.processes.roles.server import Server
from paceline.processes.roles.step_trace import SKIPPED, STEPS, StepTrace
from paceline.processes.roles.stopwatch import CATEGORIES, Category, Stopwatch
from paceline.processes.roles.train_loop import BatchSupply
from paceline.processes.roles.worker_session import WorkerSession
from paceline.processes.supervisor.profile_summary import clear, collected, write
from paceline.runtime.hook_calls import HookCalls
from paceline.schemes.async_ import AsyncSGD
from paceline.task import Task


class Stage:
    """A worker's session and a server in the memory of one run."""

    def __init__(self, **plan: Any) -> None:
        self.task: Task = build.task_of("toy", {})
        self.theatre = Theatre(AsyncSGD(), self.task.start(0), workers=1, **plan)
        self._ours, self._theirs = socket.socketpair()
        self.session = WorkerSession(self.theatre.memory(0), self.task, 0, [], Control(self._theirs))
        self.server = Server(self.theatre.memory(1), 0)

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()
        self.theatre.close()

    def replaced(self) -> dict[str, set[str]]:
        """The methods of each part that are not those of its class."""
        session, server = self.session, self.server
        parts = {
            "wakeup": session.memory.wakeup,
            "waiting": session.waiting,
            "calls": session._calls,
            "means": session._means,
            "checkpoints": session._checkpoints,
            "hooks": session.hooks,
            "server": server,
            "scheduler": server.scheduler,
        }
        known = {
            name: {key for key in vars(part) if callable(getattr(type(part), key, None))}
            for name, part in parts.items()
        }
        return {name: own for name, own in known.items() if own}


@pytest.fixture
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    made = Stage(**request.param)
    yield made
    made.close()


@pytest.mark.parametrize("stage", [{}], indirect=True)
def test_without_the_option_nothing_is_wrapped(stage: Stage) -> None:
    session = stage.session
    assert session.profile is NOT_PROFILED
    assert stage.replaced() == {}
    assert session._advance == session._driver.advance
    methods = stage.theatre.scheme.methods
    assert stage.server._methods == [methods[name] for name in sorted(methods)]
    supply = BatchSupply(session, stage.task)
    assert session.profile.batches(supply) is supply
    assert session.profile.timed(Category.GRADIENT, stage.task.grad) == stage.task.grad
    assert collected(session.memory.plan, session.board) is None


@pytest.mark.parametrize("stage", [{"profile": True}], indirect=True)
def test_with_it_every_part_is_measured(stage: Stage) -> None:
    assert type(stage.session.profile) is Profiled
    assert stage.replaced().keys() == {
        "wakeup",
        "waiting",
        "calls",
        "means",
        "checkpoints",
        "hooks",
        "server",
        "scheduler",
    }
    assert stage.session._advance != stage.session._driver.advance
    assert not set(stage.server._methods) & set(stage.theatre.scheme.methods.values())


@pytest.mark.parametrize("stage", [{"profile": True}], indirect=True)
def test_a_call_of_a_server_method_is_an_update(stage: Stage) -> None:
    times = stage.theatre.board.times[0]
    measured = stage.session.profile.methods(stage.theatre.scheme.methods.values())
    stage.session.profile.start()
    before = times[Category.UPDATE]
    state = stage.session.memory.server_state()
    measured[0].function(stage.theatre.scheme, state)
    assert measured[0].name == "pull"
    assert times[Category.UPDATE] > before
    stage.session.profile.stop()


def test_every_part_of_a_profile_has_its_counterpart_without() -> None:
    public = {name for name in vars(Profiled) if not name.startswith("_")}
    assert public <= set(vars(NotProfiled))


@pytest.mark.parametrize(("hooks", "traced"), [([], True), ([Profiler()], False)])
def test_the_hook_profiler_traces_in_place_of_it(hooks: list[Any], traced: bool) -> None:
    theatre = Theatre(AsyncSGD(), torch.zeros(3), workers=2, processes=1, profile=True)
    assert bool(profiling.of_worker(theatre.memory(0), 0, hooks).own_hooks()) == traced
    # torch has one profiler for all workers of a process
    assert not profiling.of_worker(theatre.memory(1), 1, hooks).own_hooks()
    theatre.close()


class TestTrace:
    def trace(self, tmp_path: Path, steps: int, clock: float = 0.0) -> Path:
        session = FakeSession(directory=tmp_path)
        passed = iter(range(10**6))
        hook = StepTrace(Stopwatch([0] * TIMES), lambda: clock * next(passed))
        hook.begin(session)
        for _ in range(steps):
            hook.before_step(session)
            torch.ones(2).add_(1)
            session.worker.t += 1
            hook.after_step(session)
        hook.end(session)
        return tmp_path / "profile" / "worker-0.trace.json.gz"

    def additions(self, path: Path) -> int:
        with gzip.open(path) as content:
            return sum(event.get("name") == "aten::add_" for event in json.load(content)["traceEvents"])

    @pytest.mark.parametrize(("steps", "traced"), [(SKIPPED + STEPS + 7, STEPS), (SKIPPED + 3, 3)])
    def test_it_has_some_steps_after_the_first_ones(self, tmp_path: Path, steps: int, traced: int) -> None:
        assert self.additions(self.trace(tmp_path, steps)) == traced

    def test_slow_steps_end_it_before(self, tmp_path: Path) -> None:
        assert self.additions(self.trace(tmp_path, SKIPPED + STEPS, clock=1.0)) == 2

    def test_a_run_that_is_too_short_has_none_and_a_second_life_keeps_the_first(self, tmp_path: Path) -> None:
        path = self.trace(tmp_path, SKIPPED)
        assert not path.exists()
        self.trace(tmp_path, SKIPPED + 1)
        self.trace(tmp_path, SKIPPED + 5)
        assert self.additions(path) == 1
        assert [one.name for one in path.parent.iterdir()] == [path.name]  # nothing unfinished

    def test_it_traces_the_same_steps_when_it_rests(self, tmp_path: Path) -> None:
        session, hook = FakeSession(directory=tmp_path), StepTrace(Stopwatch([0] * TIMES), lambda: 0.0)
        calls, called = HookCalls([hook], session), 0
        calls.begin()
        before_step = hook.before_step

        def counted(session: Any) -> None:
            nonlocal called
            called += 1
            before_step(session)

        hook.before_step = counted  # type: ignore[method-assign]
        for _ in range(SKIPPED + STEPS + 500):
            calls.before_step()
            torch.ones(2).add_(1)
            session.worker.t += 1
            calls.after_step()
        calls.end()
        assert self.additions(tmp_path / "profile" / "worker-0.trace.json.gz") == STEPS
        assert called <= STEPS + 2


class TestSummary:
    @pytest.fixture
    def theatre(self, tmp_path: Path) -> Iterator[Theatre]:
        made = Theatre(AsyncSGD(), torch.zeros(3), workers=2, profile=True, directory=tmp_path)
        yield made
        made.close()

    def test_what_is_missing_is_named(self, theatre: Theatre, tmp_path: Path) -> None:
        theatre.board.times[1][Category.GRADIENT] = 2 * 10**9
        theatre.board.node[1] = 1
        found = collected(theatre.plan, theatre.board)
        assert found is not None
        assert found.roles == {"worker:1": dict.fromkeys(CATEGORIES, 0.0) | {"gradient": 2.0}}
        assert found.notes == [
            "no times of server:0, worker:0: no step was begun there",
            "no trace of worker:0: a trace begins after 10 steps",
            "no trace of worker:1: it begins after 10 steps, on nodes that see the run directory",
        ]

    def test_it_is_written_and_cleared_by_the_next_launch(self, theatre: Theatre, tmp_path: Path) -> None:
        theatre.board.times[0][Category.WAIT] = 10**9
        (tmp_path / "profile").mkdir()
        (tmp_path / "profile" / "worker-1.trace.json.gz").touch()
        found = collected(theatre.plan, theatre.board)
        assert found is not None
        assert found.traces == ["profile/worker-1.trace.json.gz"]
        write(tmp_path, found)
        told = json.loads((tmp_path / "profile" / "times.json").read_text())
        assert told["roles"]["worker:0"]["wait"] == 1.0
        clear(tmp_path)
        assert list((tmp_path / "profile").iterdir()) == []
