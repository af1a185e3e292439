"""Several nodes: who is waited for at the start, and tasks that are asked to leave. Data: scikit-learn's digits."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from nodes import nodes
from processes import Linger, Story, finished, leaving_nothing, run

from paceline.network.nodes import coordinator
from paceline.processes.supervisor.status import Status
from paceline.runs import checkpoint
from paceline.runs.replay.replay import replay

TASK = "digits-mlp"


class Once:
    """Does something once, when so many updates have been made."""

    def __init__(self, update: int, *deeds: object) -> None:
        self.update, self.deeds, self.done = update, deeds, False

    def __call__(self, status: Status) -> None:
        if not self.done and status.updates >= self.update:
            self.done = True
            for deed in self.deeds:
                deed()  # type: ignore[operator]


@pytest.mark.parametrize(("scheme", "servers"), [("sync", 1), ("async", 1), ("hogwild", 1), ("allreduce", 0)])
def test_nobody_begins_before_all_have_joined_however_late(tmp_path: Path, scheme: str, servers: int) -> None:
    """A worker that comes later than patience allows for waiting, which is not what it is for."""
    with leaving_nothing(), nodes(late=("worker:2",)) as made:
        made.late = 4.0
        seen: list[int] = []

        def look(status: Status) -> None:
            if not story_joined(said):
                seen.append(status.updates)

        said: list[str] = []
        story = run(
            tmp_path / "run",
            TASK,
            scheme,
            steps=60,
            workers=3,
            servers=servers,
            patience=2.0,
            watch=look,
            said=said,
            launcher=made.launcher,
        )
    finished(story, 60, over=3)
    assert set(seen) == {0}
    assert story.told(f"all {3 + servers} roles have joined")


def story_joined(said: list[str]) -> bool:
    return any("roles have joined" in text and text.startswith("all") for text in said)


def absent(tmp_path: Path, scheme: str, policy: str, role: str, steps: int = 200, **settings: object) -> Story:
    """A run whose role stays away."""
    with leaving_nothing(), nodes(late=(role,)) as made:
        made.late, made.join, made.join_policy = 1000.0, 3.0, policy
        story = run(
            tmp_path / "run", TASK, scheme, steps=steps, workers=3, patience=5.0, launcher=made.launcher, **settings
        )
        os.kill(made.agents[role], signal.SIGKILL)
        assert made.wait(role) == -signal.SIGKILL
        for part in list(made.agents):  # a run that fails tells them
            assert made.wait(part) == int(story.error is not None)
    return story


@pytest.mark.parametrize("scheme", ["sync", "async"])
def test_a_run_that_somebody_does_not_join_in_time_fails_and_says_who(tmp_path: Path, scheme: str) -> None:
    story = absent(tmp_path, scheme, "fail", "worker:2")
    assert "worker:2 did not join within 3 s" in str(story.error)
    assert not story.told("all", "joined")


@pytest.mark.parametrize("scheme", ["sync", "async", "easgd"])
def test_or_it_goes_on_without_them_and_says_so_at_the_end(tmp_path: Path, scheme: str) -> None:
    result = finished(absent(tmp_path, scheme, "go-on", "worker:2"), 200, over=3)
    assert "worker:2 did not join within 3 s: continuing without it" in result.warnings
    assert "worker:2 never joined" in result.warnings
    assert replay(tmp_path / "run").match


def test_a_server_that_does_not_join_is_played_where_there_is_room(tmp_path: Path) -> None:
    story = absent(tmp_path, "sync", "go-on", "server:0")
    assert story.told("server:0 moves to")
    finished(story, 200)


@pytest.mark.parametrize("scheme", ["async", "sync", "allreduce"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_task_that_is_asked_to_leave_leaves_alone(
    tmp_path: Path, scheme: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "TOGETHER", 0.5)
    gate = tmp_path / "gate"
    with leaving_nothing(), nodes() as made:

        def look(status: Status) -> None:
            ask(status)
            if ask.done and "worker:1" in made.agents and made.ended("worker:1"):
                gate.touch()

        ask = Once(50, lambda: os.kill(made.agents["worker:1"], number))
        story = run(
            tmp_path / "run",
            TASK,
            scheme,
            steps=400,
            workers=3,
            restarts=0,  # it was no death
            watch=look,
            hooks=[Linger(gate, 200)],
            launcher=made.launcher,
        )
    result = finished(story, 400, over=3)
    assert made.codes["worker:1"] == 128 + number
    assert story.told("worker:1", "asked to leave")
    assert "worker:1 did not come back before the end" in result.warnings
    assert replay(tmp_path / "run").match


def test_a_server_that_is_asked_to_leave_loses_nothing_that_was_made_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No checkpoint but the first would be written: the one before it goes is the hub's doing."""
    monkeypatch.setattr(coordinator, "TOGETHER", 0.5)
    gate = tmp_path / "gate"
    with leaving_nothing(), nodes() as made:

        def look(status: Status) -> None:
            ask(status)
            if ask.done and "server:0" in made.agents and made.ended("server:0"):
                made.codes["left"] = made.codes.pop("server:0")
                made.start("server:0")
                gate.touch()

        ask = Once(150, lambda: os.kill(made.agents["server:0"], signal.SIGTERM))
        story = run(
            tmp_path / "run",
            TASK,
            "async",
            steps=600,
            workers=2,
            watch=look,
            hooks=[Linger(gate, 300)],
            launcher=made.launcher,
        )
    finished(story, 600, over=2)
    assert made.codes["left"] == 128 + signal.SIGTERM
    back = [text for text in story.said if "returning to the checkpoint" in text]
    assert len(back) == 1
    assert int(back[0].split("update ")[1].split(" ")[0].replace(",", "")) >= 150, back


@pytest.mark.parametrize("scheme", ["async", "sync", "allreduce"])
@pytest.mark.parametrize("first", ["agents", "chief"])
def test_a_signal_to_all_tasks_interrupts_the_run_whichever_gets_it_first(
    tmp_path: Path, scheme: str, first: str
) -> None:
    with leaving_nothing(), nodes() as made:

        def everybody() -> None:
            agents = [lambda pid=pid: os.kill(pid, signal.SIGTERM) for pid in made.agents.values()]
            chief = [lambda: os.kill(os.getpid(), signal.SIGTERM)]
            for one in [*agents, *chief] if first == "agents" else [*chief, *agents]:
                one()
                threading.Event().wait(0.3)

        story = run(
            tmp_path / "run",
            TASK,
            scheme,
            steps=1_000_000,
            workers=3,
            watch=Once(50, everybody),
            launcher=made.launcher,
        )
        codes = {part: made.wait(part) for part in list(made.agents)}
    assert isinstance(story.error, KeyboardInterrupt), story.said
    assert set(codes.values()) == {130}, codes
    assert story.directory.state == "interrupted"
    saved = checkpoint.newest(tmp_path / "run" / "checkpoints", lambda _: None)
    assert saved is not None
    assert saved.step >= 50


def test_an_interrupted_run_whose_server_goes_first_is_interrupted_all_the_same(tmp_path: Path) -> None:
    with leaving_nothing(), nodes() as made:

        def both() -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            made.cut("server:0")

        story = run(
            tmp_path / "run",
            TASK,
            "async",
            steps=1_000_000,
            workers=2,
            checkpoint_steps=20,
            restarts=0,
            patience=20.0,
            watch=Once(100, both),
            launcher=made.launcher,
        )
        codes = {part: made.wait(part) for part in list(made.agents)}
    assert isinstance(story.error, KeyboardInterrupt), (story.error, story.said)
    assert set(codes.values()) == {130}, codes
    assert story.directory.state == "interrupted"
    assert story.seconds < 20  # nobody waits for a server that is not coming


def test_an_interrupt_before_everybody_is_there_ends_the_run_at_once(tmp_path: Path) -> None:
    with leaving_nothing(), nodes(late=("server:0",)) as made:
        made.late = 1000.0
        shots: list[int] = []

        def look(status: Status) -> None:
            joined = {role.name for role in status.roles if role.pid}
            if {"chief", "worker:1"} <= joined and not shots:
                shots.append(1)
                os.kill(os.getpid(), signal.SIGTERM)

        story = run(
            tmp_path / "run", TASK, "async", steps=100, workers=2, patience=30.0, watch=look, launcher=made.launcher
        )
        made.cut("server:0")
        assert made.wait("worker:1") == 130
    assert isinstance(story.error, KeyboardInterrupt), story.said
    assert not story.told("all", "joined")
    assert story.seconds < 20
