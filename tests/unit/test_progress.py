"""What others can read of a running run, and the warning that its newest checkpoint grows old."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
from test_live import role, status

from paceline.config.plan import Plan
from paceline.hook import Hook
from paceline.hooks.checkpoint_saver import CheckpointSaver
from paceline.processes.supervisor.progress import Progress
from paceline.processes.supervisor.status import UpdateRate, time_left
from paceline.report.run_detail import detail
from paceline.report.run_tables import summary
from paceline.runs.progress_log import ProgressLog
from paceline.runs.run_directory import STATUS, RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory.create(tmp_path / "run", "run")
    made.write_plan({"task": "toy", "scheme": "async", "workers": 2})
    return made


def watched(run: RunDirectory, hooks: list[Hook], warned: list[str], patience: float = 10.0) -> Progress:
    return Progress(run, Plan(patience=patience), hooks, warned.append, ProgressLog(run.path, 1, time.monotonic()))


def test_what_is_written_is_what_show_tells(run: RunDirectory) -> None:
    one = status(
        role("chief"),
        role("worker:1", "waiting", step=77, restarts=2),
        updates=540,
        goal=50_000,
        seconds=12.0,
        updates_per_second=45.0,
        checkpoint=500,
        checkpoint_age=3.0,
        seconds_left=100.0,
    )
    watched(run, [], []).note(one)
    told = run.status()
    assert told is not None
    assert told["updates"] == 540
    assert summary(run)["updates"] == 540
    with run.lock():
        text = "\n".join(_text(part) for part in detail(run))
    for words in ("540 of 50,000 (1%)", "45 updates/s", "update 500, 3 s old", "waiting, step 77, 2 restarts", "left"):
        assert words in text, text


def _text(part: object) -> str:
    from rich.console import Console

    console = Console(width=160)
    with console.capture() as caught:
        console.print(part)
    return caught.get()


def test_it_is_gone_when_the_run_has_a_result(run: RunDirectory) -> None:
    one = watched(run, [], [])
    one.note(status())
    one.end()
    assert run.status() is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"at": "x"}', '{"at": 1}', '{"at": 1, "goal": "a", "updates": {}}'])
def test_a_damaged_file_tells_nothing_and_breaks_nothing(run: RunDirectory, text: str) -> None:
    (run.path / STATUS).write_text(text)
    detail(run)
    json.dumps(summary(run))


def test_an_old_checkpoint_is_warned_about_and_again_when_it_is_twice_as_old(run: RunDirectory) -> None:
    warned: list[str] = []
    one = watched(run, [CheckpointSaver(seconds=5.0)], warned)
    for age in range(0, 120):
        one.note(status(updates=1000, checkpoint=900, checkpoint_age=float(age)))
    assert [text.split(" is ")[1].split(" old")[0] for text in warned] == ["26 s", "52 s", "1 min 44 s"]
    assert "100 updates would be lost" in warned[0]
    assert "every 5 s" in warned[0]
    one.note(status(updates=2000, checkpoint=2000, checkpoint_age=0.0))
    one.note(status(updates=2100, checkpoint=2000, checkpoint_age=30.0))
    assert len(warned) == 4


@pytest.mark.parametrize(
    ("hooks", "behind", "age"),
    [
        ([CheckpointSaver(seconds=60.0)], 100, 70.0),  # not overdue by two patiences
        ([CheckpointSaver(every=100)], 150, 500.0),  # slow, but not overdue
        ([], 100, 500.0),  # none are asked for
        ([CheckpointSaver(seconds=5.0)], 0, 500.0),  # nothing would be lost
        ([CheckpointSaver(seconds=5.0)], 100, math.nan),  # nobody knows yet
    ],
)
def test_no_warning_without_need(run: RunDirectory, hooks: list[Hook], behind: int, age: float) -> None:
    warned: list[str] = []
    watched(run, hooks, warned).note(status(updates=1000, checkpoint=1000 - behind, checkpoint_age=age))
    assert not warned


def test_the_time_left_is_by_updates_or_by_the_clock_whichever_ends_the_run_first() -> None:
    pace = UpdateRate()
    for second in range(11):
        pace.note(float(second), 10 * second)
    assert time_left(status(updates=100, goal=200), pace, 10.0) == pytest.approx(10.0)
    assert time_left(status(updates=100, goal=200, seconds_left=4.0), pace, 10.0) == 4.0
    assert time_left(status(updates=100, goal=None, seconds_left=4.0), pace, 10.0) == 4.0
    assert time_left(status(updates=100, goal=200, seconds_left=400.0), pace, 10.0) == pytest.approx(10.0)
    assert math.isnan(time_left(status(updates=100, goal=None), pace, 10.0))
