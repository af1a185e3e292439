"""Hooks that have nothing to do at a step are not called, and act at the same steps as if they were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from paceline.hook import Hook, Rest, Session
from paceline.hooks._periodic import EveryOrSeconds
from paceline.hooks.checkpoint_saver import CheckpointSaver
from paceline.hooks.log import Log
from paceline.hooks.step_printer import StepPrinter
from paceline.runtime.hook_calls import HookCalls
from tests.unit.hook_session import FakeSession


@dataclass
class Acting(EveryOrSeconds, name="acting"):
    """Notes the updates at which it acts, and how often it is called."""

    def begin(self, session: Session) -> None:
        self.acted: list[int] = []
        self.asked = 0
        super().begin(session)

    def count(self, session: Session) -> int:
        self.asked += 1
        return session.updates

    def rests(self, session: Session) -> Rest | None:
        return self._timer.rest()

    def act(self, session: Session) -> None:
        self.acted.append(session.updates)


class Restless(Acting, name="restless"):
    """The same, called at every step."""

    def rests(self, session: Session) -> Rest | None:
        return None


def ran(hooks: list[Any], jumps: list[int], seconds: float) -> None:
    session = FakeSession()
    calls = HookCalls(hooks, session)
    calls.begin()
    for jump in jumps:
        calls.before_step()
        session.updates += jump
        session.seconds += seconds
        calls.after_step()


@pytest.mark.parametrize("options", [{"every": 7}, {"every": 1}, {"seconds": 0.3}, {"seconds": 0.05}, {"seconds": 1.0}])
def test_a_hook_that_rests_acts_at_the_same_updates(options: dict[str, Any]) -> None:
    jumps = [1, 1, 3, 1, 8, 1, 1, 1, 20, 1] * 20
    rests, never = Acting(**options), Restless(**options)
    ran([rests], jumps, 0.1)
    ran([never], jumps, 0.1)
    assert rests.acted == never.acted
    assert rests.acted
    assert rests.asked <= never.asked


def test_it_is_called_seldom() -> None:
    hook = Acting(every=100)
    ran([hook], [1] * 1000, 0.001)
    assert hook.acted == list(range(100, 1001, 100))
    assert hook.asked < 30


def test_one_hook_that_never_rests_is_called_at_every_step() -> None:
    class Counting(Hook, name="counting"):
        steps = 0

        def after_step(self, session: Session) -> None:
            self.steps += 1

    counting, resting = Counting(), Acting(every=50)
    ran([resting, counting], [1] * 200, 0.001)
    assert counting.steps == 200
    assert resting.acted == [50, 100, 150, 200]


def test_before_step_is_called_again_when_the_time_has_come() -> None:
    class Prepared(Acting, name="prepared"):
        before = 0

        def before_step(self, session: Session) -> None:
            self.before += 1

    hook, session = Prepared(seconds=1.0), FakeSession()
    calls = HookCalls([hook], session)
    calls.begin()
    for _ in range(100):
        session.seconds += 0.11  # between two steps
        calls.before_step()
        session.updates += 1
        calls.after_step()
    assert len(hook.acted) == 10
    assert hook.before == 11  # at the first step, and whenever it acts


def test_a_hook_that_never_rests_does_not_wake_the_others() -> None:
    class Counting(Hook, name="counting"):
        steps = 0

        def before_step(self, session: Session) -> None:
            self.steps += 1

    counting, resting, other = Counting(), Acting(every=100), Acting(seconds=0.5)
    ran([resting, counting, other], [1] * 1000, 0.001)
    assert counting.steps == 1000
    assert resting.acted == list(range(100, 1001, 100))
    assert [resting.asked < 40, other.asked < 40] == [True, True]


def test_equal_hooks_rest_each_for_itself() -> None:
    first, second = Acting(every=10), Acting(every=10)
    assert first == second
    ran([first, second], [1] * 100, 0.001)
    assert first.acted == second.acted == list(range(10, 101, 10))


def test_a_hook_may_rest_for_steps_of_its_worker() -> None:
    class OfSteps(EveryOrSeconds, name="of-steps"):
        of_steps = True

        def begin(self, session: Session) -> None:
            self.acted: list[int] = []
            self.asked = 0
            super().begin(session)

        def after_step(self, session: Session) -> None:
            self.asked += 1
            super().after_step(session)

        def rests(self, session: Session) -> Rest | None:
            return self._timer.rest(of_steps=True)

        def act(self, session: Session) -> None:
            self.acted.append(session.worker.t)

    hook, session = OfSteps(every=25), FakeSession()
    calls = HookCalls([hook], session)
    calls.begin()
    for step in range(1, 101):
        calls.before_step()
        session.updates += 7  # of all workers
        session.worker.t = step
        calls.after_step()
    assert hook.acted == [25, 50, 75, 100]
    assert hook.asked == 5


def test_the_hooks_of_a_default_run_are_not_called_while_they_rest() -> None:
    """A run has the hooks checkpoint-saver and summary-saver; with --profile it has a trace of its first steps too."""
    for hook, steps in (
        (CheckpointSaver(seconds=60.0), 1),
        (Log(), 1),
        (Log(seconds=9.0), 1),
        (StepPrinter(every=9), 1),
    ):
        session = FakeSession()
        calls = HookCalls([hook], session)
        calls.begin()
        called: list[Any] = []
        hook.after_step = called.append  # type: ignore[method-assign]
        for _ in range(8):
            calls.before_step()
            calls.after_step()
        assert len(called) == steps
