"""`progress.jsonl`: what is written of a launch, and what the page reads of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from test_live import role, status

from paceline.config.plan import Plan
from paceline.processes.supervisor.progress import Progress
from paceline.processes.supervisor.run_summaries import RunSummaries
from paceline.processes.supervisor.status import LETTERS, RoleState
from paceline.report.web.run_view import POINTS, RunView, course, evaluations
from paceline.runs import progress_log
from paceline.runs.progress_log import FILE, MOST_EVENTS, ProgressLog, ProgressReader
from paceline.runs.run_directory import RunDirectory


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress_log.time, "monotonic", made)
    return made


def test_every_state_has_a_letter_of_its_own() -> None:
    assert set(LETTERS) == set(RoleState)
    assert len(set(LETTERS.values())) == len(RoleState)


def test_an_hour_takes_some_thousand_lines(tmp_path: Path, clock: Clock) -> None:
    log = ProgressLog(tmp_path, 1, clock.now)
    log.begin(["chief"], None)
    while clock.now < 3700.0:
        log.note({"updates": 1}, ["chief"])
        clock.now = max(clock.now + 0.125, 100.0 + log._next)
    lines = ProgressReader(tmp_path).refresh()
    assert 900 < len(lines) < 1200
    assert lines[2]["seconds"] == 0.25


def test_events_before_the_first_line_and_too_many_of_them(tmp_path: Path, clock: Clock) -> None:
    log = ProgressLog(tmp_path, 3, clock.now)
    log.event("warn", "early")
    assert not (tmp_path / FILE).exists()
    log.begin(["chief", "worker:1"], 50)
    for number in range(MOST_EVENTS + 10):
        log.event("warn", f"{number}")
    lines = ProgressReader(tmp_path).refresh()
    assert [line.get("launch") for line in lines[:2]] == [3, None]
    assert lines[1]["text"] == "early"
    assert len(lines) == 1 + MOST_EVENTS
    assert "further ones are not recorded" in lines[-1]["text"]


def test_a_reader_gets_what_was_added_and_omits_what_is_damaged(tmp_path: Path, clock: Clock) -> None:
    log, reader = ProgressLog(tmp_path, 1, clock.now), ProgressReader(tmp_path)
    assert reader.refresh() == []
    log.begin(["chief"], None)
    assert len(reader.refresh()) == 1
    with (tmp_path / FILE).open("ab") as stream:
        stream.write(b'{"seconds": 1, "upd')  # a crash
    assert len(reader.refresh()) == 1
    log.note({"updates": 7, "loss": math.nan}, ["chief"])
    assert [line.get("updates") for line in reader.refresh()] == [None, 7]
    assert reader.lines[-1]["loss"] is None
    (tmp_path / FILE).write_bytes(b"\xff\n[1]\nnull\n")
    assert reader.refresh() == []
    (tmp_path / FILE).unlink()
    assert reader.refresh() == []


def test_a_full_disk_ends_no_run(tmp_path: Path, clock: Clock) -> None:
    log = ProgressLog(tmp_path / "deleted", 1, clock.now)
    log.begin(["chief"], None)
    log.note({}, ["chief"])
    log.event("warn", "text")
    assert not (tmp_path / "deleted").exists()


def test_restarts_returns_and_stops_are_events(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "run")
    log = ProgressLog(run.path, 1, 0.0)
    log.begin(["chief", "worker:1"], 100)
    progress = Progress(run, Plan(), [], lambda _: None, log)
    for state, updates, stopping in (
        ("training", 50, ""),
        ("restarting", 50, ""),
        ("training", 20, ""),
        ("training", 60, "interrupted"),
        ("training", 61, "interrupted"),
    ):
        progress.note(status(role("chief"), role("worker:1", state), updates=updates, stopping=stopping))
    progress.end()
    found = [(line["event"], line["text"]) for line in ProgressReader(run.path).refresh() if "event" in line]
    assert [kind for kind, _ in found] == ["restarted", "rolled back", "stop"]
    assert found[1][1] == "from update 50 to update 20"
    last = ProgressReader(run.path).refresh()[-1]
    assert [one["name"] for one in last["roles"]] == ["chief", "worker:1"]
    assert last["states"] == LETTERS[RoleState.TRAINING] * 2


def test_a_role_that_was_not_planned_joins(tmp_path: Path) -> None:
    """Its state has a letter from then on: for the page, and for the part of the time that it waits."""
    run = RunDirectory.create(tmp_path / "run", "run")
    log = ProgressLog(run.path, 1, 0.0, RunSummaries(Plan(directory=str(run.path)), "").line)
    log.begin(["chief"], 100)
    progress = Progress(run, Plan(), [], lambda _: None, log)
    progress.note(status(role("chief"), updates=1))
    progress.note(status(role("chief"), role("evaluator", "waiting"), updates=2))
    progress.end()
    found = course(ProgressReader(run.path).refresh())
    assert found["names"] == ["chief", "evaluator"]
    assert found["states"][-1] == LETTERS[RoleState.TRAINING] + LETTERS[RoleState.WAITING]


class TestCourse:
    def test_a_later_launch_follows_the_one_before(self) -> None:
        lines = [
            {"launch": 1, "roles": ["chief"]},
            {"seconds": 1.0, "updates": 5, "states": "t"},
            {"event": "stop", "seconds": 4.0, "text": "interrupted"},
            {"launch": 2, "roles": ["chief", "worker:1"]},
            {"seconds": 2.0, "updates": 9, "states": "tw"},
        ]
        found = course(lines)
        assert found["curves"]["t"] == [1.0, 6.0]
        assert found["curves"]["updates"] == [5, 9]
        assert [one["t"] for one in found["launches"]] == [0.0, 4.0]
        assert found["names"] == ["chief", "worker:1"]
        assert found["events"][0]["t"] == 4.0
        history = [
            {"update": 4, "seconds": 3.0, "loss": 2.0},
            {"update": 9, "seconds": 1.5, "loss": 1.0},
        ]
        assert evaluations(history, found["launches"])["t"] == [3.0, 5.5]

    def test_long_ones_are_thinned_out_and_keep_their_ends(self) -> None:
        lines = [{"seconds": float(n), "updates": n} for n in range(12_345)]
        updates = course(lines)["curves"]["updates"]
        assert len(updates) <= POINTS + 1
        assert (updates[0], updates[-1]) == (0, 12_344)

    def test_lines_of_another_version(self) -> None:
        lines = [{"launch": 1}, {"seconds": "x"}, {"other": 1}, {"seconds": 1}, {"event": "new", "seconds": 2}]
        found = course(lines)
        assert found["curves"]["updates"] == [None]
        assert found["names"] == []


class TestStates:
    @pytest.fixture
    def run(self, tmp_path: Path) -> RunDirectory:
        made = RunDirectory.create(None, "toy-sync", tmp_path)
        made.write_plan({"task": "toy", "scheme": "sync", "workers": 2})
        return made

    def test_as_paceline_runs_tells_them(self, run: RunDirectory) -> None:
        view = RunView(run, "key")
        assert view.summary()["state"] == run.state == "broken off"
        with run.lock():
            assert view.summary()["state"] == run.state == "running"
        for result, state in (
            ({"updates": 7}, "done"),
            ({"error": "a NaN loss"}, "failed"),
            ({"stopped": "interrupted"}, "interrupted"),
        ):
            run.write_result(result)
            assert view.summary()["state"] == run.state == state
        assert view.detail()["stopped"] == "interrupted"
        (run.path / "result.json").write_text("{")
        assert view.summary()["state"] == run.state == "damaged"
        assert view.detail()["error"] is None

    def test_files_that_hold_nonsense(self, run: RunDirectory) -> None:
        for name in ("plan.json", "status.json", "history.jsonl", FILE):
            (run.path / name).write_text('{"roles": 3, "seconds": [], "update": {}, "at": 1}\n')
        view = RunView(run, "key")
        assert json.dumps([view.summary(), view.detail(), view.about()])

    def test_a_status_of_64_workers(self, run: RunDirectory) -> None:
        log = ProgressLog(run.path, 1, 0.0)
        progress = Progress(run, Plan(), [], lambda _: None, log)
        log.begin([f"worker:{n}" for n in range(64)], 100)
        progress.note(status(*(role(f"worker:{n}", waits_for="worker 3 at a mean") for n in range(64)), updates=5))
        with run.lock():
            detail = RunView(run, "key").detail()
        assert len(detail["roles"]) == len(detail["states"][-1]) == 64
        assert detail["roles"][9]["waits_for"] == "worker 3 at a mean"
