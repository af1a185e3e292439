"""Runs with `--profile`: what they tell of their time, also after deaths, in scripts and on several nodes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from attached import PLAIN, launch
from nodes import nodes
from processes import Linger, Story, finished, leaving_nothing, run
from test_attach_alone import alone

from paceline.processes.memory.board import Board
from paceline.processes.roles.stopwatch import CATEGORIES
from paceline.processes.supervisor.status import Status
from paceline.processes.supervisor.supervisor import Supervisor
from paceline.report.run_detail import detail
from paceline.result import Profile
from paceline.tasks.toy import toy

__all__ = ["launch"]  # pytest finds them here


def profile_of(story: Story, updates: int) -> Profile:
    found = finished(story, updates).profile
    assert found is not None
    return found


def total(times: dict[str, float]) -> float:
    return sum(times.values())


def test_the_rows_of_a_run_sum_to_its_time(tmp_path: Path) -> None:
    with leaving_nothing():
        story = run(tmp_path / "run", toy(), "sgd", workers=1, steps=60, profile=True)
    found = profile_of(story, 60)
    assert found.roles.keys() == {"worker:0"}
    times = found.roles["worker:0"]
    assert story.result is not None
    assert story.result.wall_seconds is not None
    assert story.result.wall_seconds <= total(times) <= story.seconds
    assert min(times[name] for name in ("gradient", "data", "update", "record", "hooks", "other")) > 0
    assert found.traces == ["profile/worker-0.trace.json.gz"]
    assert not found.notes
    assert json.loads((tmp_path / "run" / "profile" / "times.json").read_text())["roles"] == found.roles
    assert "profile" in {str(getattr(part, "title", "")) for part in detail(story.directory)}


@pytest.mark.parametrize("scheme", ["async", "allreduce"])
def test_every_role_has_a_row_and_a_short_run_says_that_it_has_no_trace(tmp_path: Path, scheme: str) -> None:
    servers, gate = {"server:0"} if scheme == "async" else set(), tmp_path / "gate"

    def watch(status: Status) -> None:
        if all(role.state == "waiting" for role in status.roles if role.name in servers):
            gate.touch()  # the workers need no server for their calls: without this they may end before it waits

    with leaving_nothing():
        settings: dict[str, Any] = {"workers": 2, "steps": 9, "hooks": [Linger(gate, 5)], "profile": True}
        story = run(tmp_path / "run", toy(), scheme, watch=watch, **settings)
    found = profile_of(story, 9)
    assert found.roles.keys() == {"worker:0", "worker:1"} | servers
    assert all(0 < total(times) <= story.seconds for times in found.roles.values())
    assert all(found.roles[role]["wait"] > 0 for role in found.roles if scheme == "allreduce" or role == "server:0")
    assert found.notes == ["no trace of worker:0, worker:1: a trace begins after 10 steps"]


def test_the_times_of_a_killed_worker_add_up(tmp_path: Path) -> None:
    boards: list[Board] = []
    before: list[list[int]] = []

    def launcher(*given: Any, **rest: Any) -> Supervisor:
        made = Supervisor(*given, **rest)
        boards.append(made.board)
        return made

    def watch(status: Status) -> None:
        if next(role for role in status.roles if role.name == "worker:1").restarts and not before:
            before.append(boards[0].times[1].tolist())

    with leaving_nothing():
        story = run(
            tmp_path / "run",
            toy(),
            "async",
            workers=2,
            steps=400,
            kills=["worker:1"],
            launcher=launcher,
            watch=watch,
            profile=True,
        )
        found = profile_of(story, 400)
        boards.clear()
    first = dict(zip(CATEGORIES, (ns / 1e9 for ns in before[0]), strict=False))
    after = found.roles["worker:1"]
    assert first["gradient"] > 0
    assert all(after[name] >= first[name] for name in CATEGORIES)
    assert after["gradient"] > first["gradient"]
    assert total(after) <= story.seconds


def test_without_the_option_there_is_nothing(tmp_path: Path) -> None:
    story = run(tmp_path / "run", toy(), "async", workers=1, steps=5)
    assert finished(story, 5).profile is None
    assert not (tmp_path / "run" / "profile").exists()


def test_roles_of_other_nodes_are_in_it(tmp_path: Path) -> None:
    with leaving_nothing(), nodes(one_disk=False) as made:
        story = run(tmp_path / "run", toy(), "async", workers=2, steps=60, profile=True, launcher=made.launcher)
        found = profile_of(story, 60)
    assert found.roles.keys() == {"worker:0", "worker:1", "server:0"}
    assert all(0 < total(times) <= story.seconds for times in found.roles.values())
    assert min(found.roles["worker:1"][name] for name in ("gradient", "copy", "wait")) > 0
    assert "no trace of worker:1: it begins after 10 steps, on nodes that see the run directory" in found.notes


@pytest.mark.parametrize("asked", ["command", "script"])
def test_scripts_under_paceline_run(launch: Any, asked: str) -> None:
    body = PLAIN if asked == "command" else PLAIN.replace("steps=30", "steps=30, profile=True")
    found = launch(body, profile=asked == "command").profile
    assert found.roles.keys() == {"worker:0", "worker:1", "server:0"}
    assert min(found.roles["worker:1"][name] for name in ("gradient", "data", "update", "copy")) > 0
    assert len(found.traces) == 2


def test_a_script_by_itself(tmp_path: Path) -> None:
    told = alone(tmp_path, PLAIN.replace("steps=30", "steps=30, profile=True"))
    assert told["profile"]["roles"].keys() == {"worker:0"}
    times = told["profile"]["roles"]["worker:0"]
    assert min(times[name] for name in ("gradient", "data", "update", "copy")) > 0
    assert total(times) >= told["wall_seconds"]
    assert told["profile"]["traces"]


def test_a_worker_that_waits_for_another_says_so(tmp_path: Path) -> None:
    """Worker 1 is stopped by a signal: worker 0 waits for it at a mean, and the launcher says so."""
    seen: list[str] = []

    def watch(status: Status) -> None:
        seen.extend(role.waits_for for role in status.roles if role.waits_for)

    story = run(
        tmp_path / "run",
        toy(),
        "allreduce",
        workers=2,
        steps=400,
        kills=[("worker:1", signal.SIGSTOP)],
        patience=2.0,
        watch=watch,
    )
    finished(story, 400)
    assert "worker 1 at a mean" in seen
