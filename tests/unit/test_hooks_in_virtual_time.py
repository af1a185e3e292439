"""What hooks may ask of a session, in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

import paceline
from paceline.errors import LossError, UsageError
from paceline.hook import Hook, Role, Session
from paceline.hooks.feed_function import FeedFunction
from paceline.result import Result
from paceline.simulator.engine import SimulationEngine
from paceline.task import Batch


@dataclass
class Probe(Hook, name="probe"):
    """Runs a function of the test after every step (or at the beginning) of the chief."""

    function: Callable[[Session], Any]
    at: str = "after_step"
    roles: ClassVar[frozenset[Role]] = frozenset({"chief"})

    def begin(self, session: Session) -> None:
        if self.at == "begin":
            self.function(session)

    def after_step(self, session: Session) -> None:
        if self.at == "after_step":
            self.function(session)


@dataclass
class Everywhere(Probe, name="everywhere"):
    roles: ClassVar[frozenset[Role]] = frozenset({"chief", "worker"})


def run(scheme: str, *hooks: str | Hook, **given: Any) -> Result:
    settings: dict[str, Any] = {"workers": 3, "steps": 20, "lr": 0.01} | given
    return paceline.simulate("toy", scheme, hooks=hooks, say=lambda text: None, **settings)


def test_a_session_counts_as_the_result_does() -> None:
    seen: list[tuple[int, float, int, Any]] = []

    def note(session: Session) -> None:
        seen.append((session.updates, session.seconds, session.samples, session.staleness))

    for scheme in ("async", "allreduce"):
        result = run(scheme, Probe(note))
        updates, seconds, samples, staleness = seen[-1]  # after the chief's last step that was finished
        assert 0 < updates <= result.updates
        assert 0 < samples <= result.samples
        assert result.virtual_seconds is not None
        assert 0 < seconds <= result.virtual_seconds
        counted = sum(staleness.histogram.values())
        assert 0 < counted <= sum(result.staleness.histogram.values())
        assert staleness.max <= result.staleness.max


def test_the_first_reason_to_stop_is_the_reason() -> None:
    result = run("sync", Probe(lambda session: session.stop("one")), Probe(lambda session: session.stop("two")))
    assert result.stopped == "one"


def test_the_model_is_a_copy_and_any_vector_can_be_evaluated() -> None:
    def look(session: Session) -> None:
        x = session.model()
        assert session.evaluate(x) == session.evaluate()
        before = session.evaluate()
        x.fill_(7.0)
        assert session.evaluate() == before
        assert session.evaluate(x) != before

    run("sync", Probe(look))


def test_records_carry_update_and_time() -> None:
    engines: list[SimulationEngine] = []
    run("sync", "validation:every=5", watch=engines.append)
    recorded = engines[0].recorded
    assert [point["update"] for point in recorded] == [5, 10, 15]  # the last update ends the run inside the step
    assert all({"update", "seconds", "loss"} <= point.keys() for point in recorded)


def test_a_rate_that_is_set_is_the_rate_that_counts() -> None:
    for scheme in ("sync", "async", "allreduce", "downpour"):
        given = run(scheme, lr=0.002)
        changed = run(scheme, Everywhere(lambda session: session.set(lr=0.002), at="begin"), lr=0.01)
        assert changed.digest == given.digest
        assert changed.digest != run(scheme, lr=0.01).digest


def test_setting_an_unknown_hyper_parameter_suggests_the_known() -> None:
    with pytest.raises(UsageError, match="did you mean 'lr'"):
        run("sync", Probe(lambda session: session.set(lrr=1.0)))


def test_a_worker_can_leave_alone_and_the_others_go_on() -> None:
    def leave(session: Session) -> None:
        if session.worker.rank == 1:
            session.leave("done")

    for scheme in ("sync", "async", "allreduce"):
        engines: list[SimulationEngine] = []
        result = run(scheme, Everywhere(leave), watch=engines.append)
        assert (result.updates, result.stopped) == (20, None)
        assert [seat.worker.t > 1 for seat in engines[0].seats] == [True, False, True]


def test_a_run_ends_when_all_have_left() -> None:
    for scheme in ("sync", "async", "allreduce"):
        result = run(scheme, "stop-at-step:num_steps=6", steps=1000)
        assert 6 <= result.updates <= 9
        assert result.stopped is not None
        assert "6 global steps" in result.stopped


def test_the_simulator_says_what_it_cannot_do() -> None:
    for hook, said in [
        ("checkpoint-saver:every=2", "no checkpoints"),
        ("summary-saver", "no directory for summaries"),
        ("profiler", "no directory for traces"),
        ("global-step-waiter:step=5", "worker:1 would wait for global step 5"),
    ]:
        with pytest.raises(UsageError, match=said):
            run("async", hook)
    run("async", "start-barrier")  # all begin at once


def test_who_began_ends_also_if_another_hook_cannot_begin() -> None:
    ended: list[str] = []

    @dataclass
    class Ends(Hook, name="ends"):
        def failed(self, session: Session, error: BaseException) -> None:
            ended.append(type(error).__name__)

        def end(self, session: Session) -> None:
            ended.append("end")

    with pytest.raises(UsageError):
        run("sync", Ends(), "summary-saver", Ends(), workers=1)
    assert ended == ["UsageError", "end"]


def test_what_is_kept_comes_back_only_from_a_checkpoint() -> None:
    def keep(session: Session) -> None:
        session.keep("mine", torch.ones(1))
        assert session.kept("mine") is None

    run("sync", Probe(keep, at="begin"))


def test_feeding_nothing_changes_no_bit_and_feeding_something_does() -> None:
    def fed(function: Callable[[Batch, Session], Any]) -> Result:
        return paceline.simulate("digits-mlp", "sync", workers=2, steps=3, hooks=[FeedFunction(function)])

    plain = fed(lambda batch, session: None)
    assert plain.digest == paceline.simulate("digits-mlp", "sync", workers=2, steps=3).digest
    half = fed(lambda batch, session: tuple(part[: batch.size // 2] for part in batch.data))
    assert half.samples == plain.samples // 2
    assert half.digest != plain.digest
    same = fed(lambda batch, session: replace(batch, seed=1))
    assert same.digest == plain.digest  # this task draws nothing from the batch's seed


def test_nan_guard_decides_what_a_broken_loss_means() -> None:
    for scheme in ("sgd", "async", "allreduce"):
        given: dict[str, Any] = {"workers": 1, "lr": 5.0, "steps": 10_000, "warn": lambda text: None}
        with pytest.raises(LossError, match="usual cure") as plain:
            run(scheme, **given)
        with pytest.raises(LossError) as guarded:
            run(scheme, "nan-guard", **given)
        assert str(guarded.value) == str(plain.value)
        stopped = run(scheme, "nan-guard:action=stop", **given)
        assert stopped.stopped is not None
        assert "the loss is" in stopped.stopped
        assert stopped.updates < 10_000


def test_stop_at_step_ends_the_run_there() -> None:
    result = run("sync", "stop-at-step:last_step=7", steps=100)
    assert result.updates == 7
    assert result.stopped == "global step 7 reached the last step 7"


def test_a_schedule_moves_the_rate() -> None:
    constant = run("async", "learning-rate:base=0.01")
    assert constant.digest == run("async").digest
    assert run("async", "learning-rate:base=0.01,kind=cosine,over=20").digest != constant.digest


def test_an_average_of_the_model_is_evaluated_at_the_end() -> None:
    engines: list[SimulationEngine] = []
    last = run("sync", "weight-ema:decay=0", watch=engines.append)
    assert {"update", "seconds", "ema_loss"} <= engines[0].recorded[-1].keys()
    slow: list[SimulationEngine] = []
    run("sync", "weight-ema:decay=1", watch=slow.append)
    assert slow[0].recorded[-1]["ema_loss"] > last.loss  # it still is where the run began


def test_early_stop_ends_a_run_that_gets_no_better() -> None:
    result = run("sync", "early-stop:every=2,patience=3", steps=1000, lr=0.0)
    assert result.updates == 8  # a first evaluation, and three in vain
    assert result.stopped is not None
    assert "no better" in result.stopped


def test_speaking_hooks_speak() -> None:
    said: list[str] = []
    hooks = ["step-printer:every=2", "step-counter:every=5", "staleness-record:every=5", "log:seconds=2"]
    paceline.simulate("toy", "async", workers=2, steps=20, lr=0.01, hooks=hooks, say=said.append)
    assert {text.split()[0] for text in said if "local step" in text} == {"worker:0", "worker:1"}
    assert any("updates/s" in text for text in said)
    assert said[-1].startswith("staleness mean")
    assert sum(text.startswith("worker:0 step") for text in said) >= 3
