"""Each hook does its thing at its time, against a session that only writes down what is asked of it."""

from __future__ import annotations

import math

import pytest
import torch
from hook_session import FakeSession, steps

from paceline.errors import LossError, UsageError
from paceline.hook import Session
from paceline.hooks.checkpoint_saver import CheckpointSaver
from paceline.hooks.early_stop import EarlyStop
from paceline.hooks.global_step_waiter import GlobalStepWaiter
from paceline.hooks.learning_rate import LearningRate
from paceline.hooks.log import Log
from paceline.hooks.nan_guard import NanGuard
from paceline.hooks.profiler import Profiler
from paceline.hooks.start_barrier import StartBarrier
from paceline.hooks.step_counter import StepCounter
from paceline.hooks.step_printer import StepPrinter
from paceline.hooks.stop_at_step import StopAtStep
from paceline.hooks.summary_saver import SummarySaver
from paceline.hooks.target import Target
from paceline.hooks.weight_ema import WeightEma
from paceline.result import Staleness


def test_the_fake_is_a_session() -> None:
    members = {name for name in vars(Session) if not name.startswith("_")}
    assert all(hasattr(FakeSession(), name) for name in members)


def test_log_shows_the_chosen_values_by_steps_or_by_time() -> None:
    session = FakeSession()
    session.staleness = Staleness(mean=1.5)
    hook = Log(every=2, values=("update", "samples", "staleness"))
    hook.begin(session)
    steps(hook, session, 5, updates=3)
    assert session.said == [
        "worker:0 step 2  update 6  samples 60  staleness 1.5",
        "worker:0 step 4  update 12  samples 120  staleness 1.5",
    ]
    timed, session = Log(seconds=2.5), FakeSession()
    timed.begin(session)
    steps(timed, session, 6)
    assert [text.split("  ")[0] for text in session.said] == ["worker:0 step 3", "worker:0 step 6"]


def test_step_printer_names_local_and_global_step() -> None:
    session, hook = FakeSession(rank=1), StepPrinter()
    hook.begin(session)
    steps(hook, session, 2, updates=2)
    assert session.said[-1] == "worker:1 local step 2  global step 4  loss 0.25"


def test_step_counter_measures_since_the_last_time() -> None:
    session, hook = FakeSession(), StepCounter(every=4)
    session.seconds = 100.0  # the first step comes late
    hook.begin(session)
    session.seconds = 200.0
    steps(hook, session, 2, updates=2, seconds=1.0)
    steps(hook, session, 2, updates=2, seconds=4.0)
    assert session.recorded == [
        {"updates_per_second": 2.0, "samples_per_second": 20.0, "bytes_sent": 400.0, "bytes_received": 1200.0},
        {"updates_per_second": 0.5, "samples_per_second": 5.0, "bytes_sent": 800.0, "bytes_received": 2400.0},
    ]
    assert session.said[0] == "update 4: 2 updates/s, 20 samples/s"
    standing, session = StepCounter(every=1), FakeSession()
    standing.begin(session)
    steps(standing, session, 3, seconds=0.0)
    assert session.recorded == []  # no time has passed, so there is no speed


def test_checkpoints_are_asked_for_by_updates_or_by_time() -> None:
    for hook, taken in [(CheckpointSaver(every=10), 2), (CheckpointSaver(), 1), (CheckpointSaver(seconds=20), 3)]:
        session = FakeSession()
        session.updates = 1003  # gone on from a checkpoint
        hook.begin(session)
        steps(hook, session, 7, updates=3, seconds=10)
        assert session.saved == taken


def test_stop_at_last_step_is_told_to_the_whole_run() -> None:
    session, hook = FakeSession(), StopAtStep(last_step=5)
    hook.begin(session)
    steps(hook, session, 2, updates=2)
    assert session.stopped == []
    steps(hook, session, updates=2)
    assert session.stopped == ["global step 6 reached the last step 5"]
    assert session.left == []
    late = FakeSession()
    late.updates = 5
    hook.begin(late)
    assert late.stopped  # nothing is left to do


def test_a_worker_leaves_so_many_steps_after_its_own_first() -> None:
    session, hook = FakeSession(), StopAtStep(num_steps=4)
    hook.begin(session)
    session.updates = 100  # the others went on while this one waited to begin
    steps(hook, session, 3)
    assert session.left == []
    steps(hook, session)
    assert session.left == ["4 global steps since update 100"]
    assert session.stopped == []


def test_late_workers_wait_away_from_the_barriers() -> None:
    for rank, hook, until in [
        (0, GlobalStepWaiter(step=10), 0),
        (3, GlobalStepWaiter(step=10), 30),
        (3, GlobalStepWaiter(step=10, ranks=(1, 3)), 10),
        (2, GlobalStepWaiter(step=10, ranks=(1, 3)), 0),
    ]:
        session = FakeSession(rank=rank, workers=4)

        def others(session: FakeSession = session) -> None:
            session.updates += 1

        session.meanwhile = others
        hook.begin(session)
        assert session.updates == until
        assert session.waited == ([(f"global step {until}", True)] if until else [])
    with pytest.raises(UsageError, match="all 2 workers would wait"):
        GlobalStepWaiter(ranks=(0, 1)).begin(FakeSession())


def test_the_barrier_opens_when_all_have_begun() -> None:
    session = FakeSession(workers=4)

    def another() -> None:
        session.workers_begun += 1

    session.meanwhile = another
    StartBarrier().begin(session)
    assert session.begun() == 4
    assert session.waited == [("all 4 workers to begin", False)]


def test_nan_guard_fails_or_stops() -> None:
    session = FakeSession(rank=1)
    NanGuard().after_gradient(session, 1.0)
    with pytest.raises(LossError, match="worker:1, step 0, update 0: the loss is inf; a smaller lr"):
        NanGuard().after_gradient(session, math.inf)
    NanGuard("stop").after_gradient(session, math.nan)
    assert session.stopped == ["worker:1, step 0, update 0: the loss is nan"]


def test_a_schedule_is_given_to_the_scheme_once_and_again_after_a_return() -> None:
    session, hook = FakeSession(), LearningRate(base=1.0, kind="step", over=3, gamma=0.5, key="server.lr", every=2)
    hook.begin(session)
    steps(hook, session, 7)
    assert session.hyper == [{"server.lr": "step:1,over=3,gamma=0.5,every=2"}]
    session.hyper.clear()  # the run has returned to a checkpoint from before
    steps(hook, session, 2)
    assert session.hyper == [{"server.lr": "step:1,over=3,gamma=0.5,every=2"}]


def test_the_moving_average_follows_the_centre_and_survives_a_checkpoint() -> None:
    session, hook = FakeSession(), WeightEma(decay=0.5)
    hook.begin(session)
    session.vector = torch.ones(2)
    steps(hook, session, 2)
    assert torch.equal(session.to_keep["ema"], torch.full((2,), 0.75))
    hook.end(session)
    assert session.recorded == [{"ema_loss": 1.5}]
    again = FakeSession()
    again.loaded["ema"] = torch.full((2,), 0.75, dtype=torch.float64)
    hook.begin(again)
    steps(hook, again)
    assert torch.equal(again.to_keep["ema"], torch.full((2,), 0.375))
    assert again.loaded["ema"][0] == 0.75  # what was loaded is not written to


def test_early_stop_is_patient_and_starts_anew_after_a_gain() -> None:
    session, hook = FakeSession(), EarlyStop(metric="accuracy", margin=0.01, patience=2, every=1)
    hook.begin(session)
    for accuracy, ends in [(0.5, 0), (0.505, 0), (0.6, 0), (0.6, 0), (0.605, 1)]:
        session.metrics = {"accuracy": accuracy}
        steps(hook, session)
        assert len(session.stopped) == ends
    assert session.stopped == ["accuracy is no better than 0.6 in 2 evaluations"]
    session.metrics = {"loss": 1.0}
    with pytest.raises(UsageError, match="early-stop: the task has no metric 'accuracy'; it has loss"):
        steps(hook, session)


def test_a_run_that_goes_on_keeps_to_the_same_multiples() -> None:
    session, hook = FakeSession(), Target("loss", value=0.0, every=50)
    session.updates = 120
    asked: list[int] = []
    session.evaluate = lambda x=None: asked.append(session.updates) or {"loss": 1.0}  # type: ignore[method-assign,func-returns-value]
    hook.begin(session)
    steps(hook, session, 10, updates=8)
    assert asked == [152, 200]


def test_hooks_that_write_need_a_directory() -> None:
    for hook in (Profiler(), SummarySaver()):
        with pytest.raises(UsageError, match=f"^{hook.name}: this run has no directory"):
            hook.begin(FakeSession())
