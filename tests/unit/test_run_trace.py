"""The times of workers, as they are written and read, and the timeline of a launch that is made of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from time import monotonic_ns

import pytest

from paceline.config.plan import Plan
from paceline.errors import DataError, UsageError
from paceline.processes.supervisor.status import LETTERS, RoleState
from paceline.runs import order_log, times_log
from paceline.runs.order_log import ROSE, MemberEvent, OrderLogWriter, RecordKind
from paceline.runs.run_directory import RunDirectory
from paceline.runs.run_trace import _broken_off, _flat, timeline_of
from paceline.runs.times_log import HEADER, Entry, Spent, Times, code
from paceline.runtime.timeline import Timeline

MS = 1_000_000
BEGAN = 5_000 * MS


def header(rank: int, life: int = 1, **more: object) -> dict[str, object]:
    return {"rank": rank, "life": life, "began": BEGAN, "methods": ["pull", "push"], **more}


def written(folder: Path, rank: int, life: int, opened: int, entries: list[tuple[Spent, int, float, float]]) -> None:
    """A file with these entries: kind, method, start and end in ms since the launch began."""
    path = times_log.path_of(folder, rank, life)
    Times(path, header(rank, life)).close()
    head = json.loads(path.read_bytes()[:HEADER]) | {"opened": BEGAN + opened * MS}
    words = b"".join(
        (BEGAN + int(start * MS)).to_bytes(8, "little")
        + (int((end - start) * MS) << 16 | code(kind, method)).to_bytes(8, "little")
        for kind, method, start, end in entries
    )
    path.write_bytes(json.dumps(head).encode().ljust(HEADER) + words)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run whose launch has an order log; the test adds times."""
    plan = Plan(task="toy", scheme="async", workers=2, directory=str(tmp_path / "run"))
    made = RunDirectory.create(tmp_path / "run", "run")
    made.write_plan(asdict(plan))
    at = order_log.place(made.path, 1)
    at.mkdir(parents=True)
    about = {"format": order_log.FORMAT, "plan": asdict(plan), "resumed": False, "versions": {}}
    (at / order_log.ABOUT).write_text(json.dumps(about | {"unnamed": [], "feeding": []}))
    server = OrderLogWriter(at / "server-1.log", {"role": "server", "life": 1, "generation": 0})
    for rank in (0, 1, 0):
        server.add(RecordKind.CALL, 1, rank, ROSE)
    server.add(RecordKind.MEMBER, MemberEvent.LEFT, 1)
    server.add(RecordKind.MEMBER, MemberEvent.JOINED, 1)
    server.add(RecordKind.CALL, 1, 1, 0)
    server.add(RecordKind.CALL, 1, 1, ROSE)
    server.close()
    for rank, life, position, calls in ((0, 1, 0, 2), (1, 1, 0, 1), (1, 2, 5, 2)):
        log = OrderLogWriter(at / f"worker-{rank}-{life}.log", {"role": f"worker-{rank}", "rank": rank, "life": life})
        begun = {"t": 0, "v": 0, "gradients": 0, "overrides": {}, "generation": 0, "position": position, "cells": None}
        log.note(begun)
        for _ in range(calls):
            log.add(RecordKind.POST, 1)
        log.close()
    return made


def seen(made: Timeline, role: str) -> list[tuple[str, float, float, str]]:
    own = [one for one in made.intervals if one.role == role]
    return [(one.kind, round(one.start * 1000, 3), round(one.end * 1000, 3), one.detail) for one in own]


def test_what_was_stamped_is_read(tmp_path: Path) -> None:
    times = Times(tmp_path / "a.times", header(3))
    before = monotonic_ns()
    for _ in range(10_000):  # the file grows on the way
        times.stamp(code(Spent.CALL, 1), before)
    times.stamp(code(Spent.GRADIENT), before - (50_000_000 * MS >> 1))  # hours
    times.close()
    read = times_log.read(tmp_path / "a.times")
    assert read.header["rank"] == 3
    assert len(read.entries) == 10_001
    assert read.entries[0][:3] == (Spent.CALL, 1, before)
    assert all(one.end <= two.end for one, two in zip(read.entries, read.entries[1:], strict=False))
    assert read.entries[-1].kind == Spent.GRADIENT
    assert read.entries[-1].end - read.entries[-1].start > 25_000_000 * MS


KILLED = """
import os, signal, sys
from pathlib import Path
from time import monotonic_ns
from paceline.runs.times_log import Spent, Times
times = Times(Path(sys.argv[1]), {"rank": 0})
for _ in range(7):
    times.stamp(Spent.GRADIENT, monotonic_ns())
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_all_its_entries_and_its_space_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "a.times"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, env=os.environ)
    assert ended.returncode == -signal.SIGKILL
    assert path.stat().st_size > HEADER + 7 * 16
    assert len(times_log.read(path).entries) == 7
    times_log.trim(path)
    assert path.stat().st_size == HEADER + 7 * 16
    assert len(times_log.read(path).entries) == 7


def test_the_space_of_a_living_process_is_left_alone(tmp_path: Path) -> None:
    times = Times(tmp_path / "a.times", header(0))
    size = (tmp_path / "a.times").stat().st_size
    times_log.trim(tmp_path / "a.times")
    assert (tmp_path / "a.times").stat().st_size == size
    times.close()


def test_intervals_with_others_inside_are_cut_around_them() -> None:
    entries = [
        Entry(Spent.WAIT, 0, 20, 50),
        Entry(Spent.WAIT, 0, 60, 80),
        Entry(Spent.CALL, 1, 10, 80),
        Entry(Spent.EVALUATION, 0, 100, 110),
        Entry(Spent.GRADIENT, 0, 90, 130),
    ]
    flat = [
        (one.kind, round(one.start * 1e9), round(one.end * 1e9), one.detail)
        for one in _flat("r", entries, 0, ["a", "b"])
    ]
    assert flat == [
        ("call", 10, 20, "b"),
        ("wait", 20, 50, ""),
        ("call", 50, 60, "b"),
        ("wait", 60, 80, ""),
        ("gradient", 90, 100, "goes on"),
        ("hooks", 100, 110, "evaluation"),
        ("gradient", 110, 130, ""),
    ]


def test_a_wait_that_the_end_of_its_step_has_ended_says_so() -> None:
    """A wait is inside the operation that is noted after it, unless that one was broken off."""
    wait = [Entry(Spent.WAIT, 0, 10 * k, 10 * k + 5) for k in range(6)]
    entries = [
        wait[0],
        Entry(Spent.MEAN, 0, 0, 8),
        wait[1],  # outside of all operations: a lock between two steps
        Entry(Spent.GRADIENT, 0, 16, 18),
        wait[2],
        Entry(Spent.RETURN, 0, 26, 29),
        wait[3],
        Entry(Spent.CHECKPOINT, 0, 29, 36),
        wait[4],
        wait[5],
        Entry(Spent.CHECKPOINT, 0, 56, 60),
    ]
    told = {round(start * 1e9): text for (start, _), text in _broken_off(entries, 0).items()}
    assert told == {20: "until the run returned to a checkpoint", 50: "until the run ended"}


def test_a_launch_with_a_death(run: RunDirectory) -> None:
    at = order_log.place(run.path, 1)
    grad, call = Spent.GRADIENT, Spent.CALL
    written(at, 0, 1, 0, [(call, 0, 1, 2), (grad, 0, 2, 5), (call, 1, 5, 6), (call, 1, 8, 9), (grad, 0, 10, 20)])
    written(at, 1, 1, 1, [(grad, 0, 2, 4), (call, 1, 4, 6.5)])
    written(at, 1, 2, 12, [(grad, 0, 13, 14), (call, 1, 14, 15), (call, 1, 16, 17)])
    lines = [
        {"launch": 1, "at": 0.0, "roles": ["chief", "worker:1", "server:0"], "goal": None},
        {"event": "warn", "seconds": 0.007, "at": 0.0, "text": "worker:1 died (signal SIGKILL); restarting it"},
        {"event": "rolled back", "seconds": 0.008, "at": 0.0, "text": "from update 3 to update 2"},
        {"event": "warn", "seconds": 0.01, "text": "server:0 died (signal SIGKILL); restarting it", "role": "server:0"},
        {"event": "restarted", "seconds": 0.011, "text": "server:0 is back", "role": "server:0"},
    ]
    lines[1]["role"] = "worker:1"
    (run.path / "progress.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = timeline_of(run)
    assert seen(made, "worker:1") == [
        ("other", 1, 2, "starting"),
        ("gradient", 2, 4, ""),
        ("call", 4, 6.5, "push"),
        ("dead", 7, 12, ""),
        ("other", 12, 13, "starting"),
        ("gradient", 13, 14, ""),
        ("call", 14, 15, "push"),
        ("call", 16, 17, "push"),
    ]
    assert seen(made, "server:0") == [  # in the order of the log, which has that of worker 1 second
        ("call", 5, 6, "push of worker:0"),
        ("call", 6, 6.5, "push of worker:1"),
        ("call", 8, 9, "push of worker:0"),
        ("dead", 10, 11, ""),
        ("call", 14, 15, "push of worker:1"),
        ("call", 16, 17, "push of worker:1"),
    ]
    assert {one.by for one in made.intervals if one.role == "server:0"} == {"worker:0", "worker:1", ""}
    marks = [(one.role, one.kind, round(one.at * 1000, 3)) for one in made.instants]
    assert marks == [
        ("worker:0", "update", 6),
        ("worker:1", "update", 6.5),
        ("worker:1", "kill", 7),
        ("run", "return", 8),
        ("worker:0", "update", 9),
        ("server:0", "kill", 10),
        ("server:0", "restart", 11),
        ("worker:1", "restart", 12),
        ("worker:1", "update", 17),
    ]
    assert made.count("gradient") == 4
    part = timeline_of(run, since=0.004, until=0.009)
    assert seen(part, "worker:0") == [("gradient", 4, 5, ""), ("call", 5, 6, "push"), ("call", 8, 9, "push")]


def test_the_evaluator_is_seen_where_progress_has_it(run: RunDirectory) -> None:
    written(order_log.place(run.path, 1), 0, 1, 0, [(Spent.GRADIENT, 0, 2, 5)])
    lines = [{"launch": 1, "at": 0.0, "roles": ["chief", "evaluator"], "goal": None}]
    letter = {"v": LETTERS[RoleState.EVALUATING], "f": LETTERS[RoleState.FOLLOWING], "t": LETTERS[RoleState.TRAINING]}
    for seconds, states in ((0.25, "tf"), (0.5, "tv"), (0.75, "tv"), (1.0, "tf"), (1.25, "tv")):
        lines.append({"seconds": seconds, "states": "".join(letter[one] for one in states)})
    (run.path / "progress.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert seen(timeline_of(run), "evaluator") == [
        ("hooks", 250, 750, "evaluation"),
        ("hooks", 1000, 1250, "evaluation"),
    ]


def test_without_events_a_death_is_after_the_last_record(run: RunDirectory) -> None:
    at = order_log.place(run.path, 1)
    written(at, 1, 1, 1, [(Spent.GRADIENT, 0, 2, 4)])
    written(at, 1, 2, 12, [(Spent.GRADIENT, 0, 13, 14)])
    made = timeline_of(run)
    assert [(one.kind, one.at) for one in made.instants if one.kind != "update"] == [
        ("kill", 0.004),
        ("restart", 0.012),
    ]
    assert any("progress.jsonl has no events" in note for note in made.notes)


def test_what_has_no_times_is_refused_with_the_reason(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no times: an older version"):
        timeline_of(run)
    with pytest.raises(UsageError, match="no launch 7 that was recorded; it has 1"):
        timeline_of(run, 7)
    bare = RunDirectory.create(tmp_path / "bare", "bare")
    bare.write_plan(asdict(Plan(task="toy", scheme="async", directory=str(bare.path))))
    with pytest.raises(DataError, match="--no-record"):
        timeline_of(bare)
    (order_log.place(run.path, 1) / "worker-0-1.times").write_bytes(b"{" * 5000)
    with pytest.raises(DataError, match="not what was written"):
        timeline_of(run)
