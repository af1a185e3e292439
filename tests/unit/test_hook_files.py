"""What hooks write into the run directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hook_session import FakeSession, steps

from paceline.hook import Hook
from paceline.hooks.profiler import Profiler
from paceline.hooks.staleness_record import StalenessRecord
from paceline.hooks.summary_saver import SummarySaver
from paceline.hooks.validation import Validation
from paceline.result import Staleness

STALENESS = Staleness(mean=2.0, max=5, histogram={0: 3, 1: 1, 5: 3}, outstanding=2)


@pytest.fixture
def session(tmp_path: Path) -> FakeSession:
    session = FakeSession(tmp_path)
    session.staleness = STALENESS
    return session


def summaries(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def test_summaries_are_drawn_over_the_global_step(session: FakeSession) -> None:
    hook = SummarySaver(every=4)
    hook.begin(session)
    session.set(lr="linear:1.0,over=10")
    steps(hook, session, 4, updates=2, seconds=0.5)
    hook.end(session)
    drawn = summaries(session.directory / "summaries")  # type: ignore[operator]
    scalars = {"gradient_norm", "learning_rate", "loss", "staleness_mean", "updates_per_second", "samples_per_second"}
    assert set(drawn.Tags()["scalars"]) == scalars | {"bytes_sent", "bytes_received"}
    assert [point.value for point in drawn.Scalars("bytes_sent")] == [400.0, 800.0]
    assert [point.value for point in drawn.Scalars("bytes_received")] == [1200.0, 2400.0]
    assert [point.step for point in drawn.Scalars("loss")] == [4, 8]
    assert [point.value for point in drawn.Scalars("updates_per_second")] == [4.0, 4.0]
    # of the step before the summary: its gradient is measured
    assert [point.value for point in drawn.Scalars("gradient_norm")] == [20.0, 40.0]
    assert [round(point.value, 6) for point in drawn.Scalars("learning_rate")] == [0.6, 0.2]
    histogram = drawn.Histograms("staleness")[-1].histogram_value
    assert (histogram.num, histogram.sum, histogram.sum_squares) == (7.0, 16.0, 76.0)
    bars = dict(zip(histogram.bucket_limit, histogram.bucket, strict=True))
    assert bars == {-0.5: 0, 0.5: 3, 1.5: 1, 4.5: 0, 5.5: 3}


def test_validation_tells_records_and_draws(session: FakeSession) -> None:
    hook = Validation(every=2)
    hook.begin(session)
    session.metrics = {"loss": 0.5, "accuracy": 0.75}
    steps(hook, session, 5)
    hook.end(session)
    assert session.recorded == [session.metrics] * 2
    assert session.said[0] == "validation: update 2  2 s  loss 0.5  accuracy 0.75"
    drawn = summaries(session.directory / "summaries" / "validation")  # type: ignore[operator]
    assert [(point.step, point.value) for point in drawn.Scalars("accuracy")] == [(2, 0.75), (4, 0.75)]


def test_validation_needs_no_directory() -> None:
    session, hook = FakeSession(), Validation(seconds=3)
    hook.begin(session)
    steps(hook, session, 7)
    hook.end(session)
    assert len(session.recorded) == 2


def test_staleness_is_recorded_and_written_at_the_end(session: FakeSession) -> None:
    hook = StalenessRecord(every=2)
    hook.begin(session)
    steps(hook, session, 5)
    hook.end(session)
    assert session.recorded == [{"staleness_mean": 2.0, "staleness_max": 5}] * 2
    assert session.said == []
    written = json.loads((session.directory / "staleness.json").read_text(encoding="utf-8"))  # type: ignore[operator]
    assert written == {"mean": 2.0, "max": 5, "histogram": {"0": 3, "1": 1, "5": 3}, "outstanding": 2}
    session.directory = None
    hook.end(session)
    assert session.said == ["staleness mean 2, max 5; gradients by staleness: 0: 3, 1: 1, 5: 3"]


def traced(hook: Hook, session: FakeSession, number: int) -> list[str]:
    hook.begin(session)
    for _ in range(number):
        hook.before_step(session)
        torch.ones(8) @ torch.ones(8)
        session.worker.t += 1
        hook.after_step(session)
    hook.end(session)
    return sorted(path.name for path in (session.directory / "profiles").glob("*"))  # type: ignore[operator]


def test_traces_are_written_for_the_chosen_workers_and_no_more_than_allowed(tmp_path: Path) -> None:
    names = traced(Profiler(every=3, steps=2, most=2), FakeSession(tmp_path), 13)
    assert names == ["worker-0-step-3.json", "worker-0-step-6.json"]
    trace = json.loads((tmp_path / "profiles" / names[0]).read_text(encoding="utf-8"))
    operations = [event["name"] for event in trace["traceEvents"]]
    assert operations.count("aten::dot") == 2  # two steps in a row
    assert traced(Profiler(every=1), FakeSession(tmp_path / "other", rank=1), 5) == []


def test_a_trace_that_the_end_cuts_short_is_thrown_away(tmp_path: Path) -> None:
    hook = Profiler(every=2, steps=2)
    assert traced(hook, FakeSession(tmp_path), 3) == []
    assert traced(hook, FakeSession(tmp_path), 4) == [
        "worker-0-step-2.json"
    ]  # and does not stand in the next one's way
