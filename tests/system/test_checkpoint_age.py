"""Checkpoints while a worker does not come to the end of its step: nobody waits longer than patience for its part."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import Linger, finished, leaving_nothing, run

from paceline.hook import Hook, Session
from paceline.processes.supervisor.status import Status
from paceline.runs import checkpoint
from paceline.runs.replay.replay import replay

TASK = "digits-mlp"


@dataclass
class Stall(Hook):
    """Worker 1 stands still inside a step until there is a file."""

    gate: Path

    def after_gradient(self, session: Session, loss: float) -> None:
        while session.worker.rank == 1 and session.worker.t >= 5 and not self.gate.exists():
            threading.Event().wait(0.05)


@pytest.mark.parametrize("killed", [False, True])
def test_a_checkpoint_does_not_wait_longer_than_patience_for_a_worker(tmp_path: Path, killed: bool) -> None:
    """Also where the run then goes back to such a checkpoint: whose part is how old is on record."""
    gate, seen = tmp_path / "gate", []

    def look(status: Status) -> None:
        seen.append(status.checkpoint)
        assert status.checkpoint_age >= 0 or not status.updates
        if status.checkpoint >= 100 and not gate.exists():
            if killed:
                server = next(role.pid for role in status.roles if role.name == "server:0")
                os.kill(server, signal.SIGKILL)
            gate.touch()

    with leaving_nothing():
        story = run(
            tmp_path / "run",
            TASK,
            "async",
            steps=900,
            workers=2,
            checkpoint_steps=30,
            patience=1.5,
            watch=look,
            hooks=[Stall(gate), Linger(gate, 600)],
        )
    result = finished(story, 900, over=2)
    assert any("worker:1 has not finished a step" in text for text in result.warnings)
    assert max(seen) >= 100
    assert story.directory.status() is None  # the run has a result
    assert replay(tmp_path / "run").match


def test_a_run_goes_on_from_a_checkpoint_that_was_written_without_a_worker(tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def look(status: Status) -> None:
        if status.checkpoint >= 100 and not gate.exists():
            gate.touch()
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # at once: no last checkpoint with everybody's part

    settings = {"workers": 2, "checkpoint_steps": 30, "patience": 1.5}
    with leaving_nothing():
        broken = run(tmp_path / "run", TASK, "async", steps=1_000_000, watch=look, hooks=[Stall(gate)], **settings)
        assert isinstance(broken.error, KeyboardInterrupt)
        saved = checkpoint.newest(tmp_path / "run" / "checkpoints", lambda _: None)
        assert saved is not None
        assert saved.step >= 100
        goal = saved.step + 500
        story = run(tmp_path / "run", TASK, "async", steps=goal, resume=True, **settings)
    assert finished(story, goal, over=2).metrics["accuracy"] > 0.8
