"""A stop lands on the end of a step. Without a server it is the same step for all: what is saved is the mean.

Data: scikit-learn's digits.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import leaving_nothing, run

from paceline import replay, simulate
from paceline.config import discovery
from paceline.hook import Hook, Session
from paceline.processes.supervisor.status import Status
from paceline.runs import checkpoint
from paceline.runs.replay.accounting import audit
from paceline.scheme import Scheme
from paceline.task import Batch
from paceline.worker import Worker

SERVERLESS = sorted(name for name in discovery.schemes() if not discovery.scheme(name).methods)


@dataclass
class StopsAt(Hook):
    """Stops the run in the middle of a window."""

    gradients: int
    _seen: int = 0

    def after_gradient(self, session: Session, loss: float) -> None:
        self._seen += 1
        if session.worker.rank == 0 and self._seen == self.gradients:
            session.stop("enough")


@dataclass
class Spoils(Hook):
    """A mini-batch without a finite loss, in the middle of a window of the second worker."""

    batch: int
    _seen: int = 0

    def feed(self, session: Session, batch: Batch) -> Batch:
        self._seen += 1
        if session.worker.rank != 1 or self._seen != self.batch:
            return batch
        x, *rest = batch.data
        return Batch((torch.full_like(x, float("nan")), *rest), batch.size, batch.seed)


class Interrupts:
    """Ctrl-C, once, after some updates."""

    def __init__(self, update: int) -> None:
        self._update, self._done = update, False

    def __call__(self, status: Status) -> None:
        if status.updates >= self._update and not self._done:
            self._done = True
            os.kill(os.getpid(), signal.SIGINT)


@dataclass(frozen=True)
class LatePairs(Scheme, name="late-pairs"):
    """Means of two workers at a time. In the last step one pair, without the chief, is late."""

    last: int = 5

    async def step(self, w: Worker) -> None:
        g = await w.grad(w.x)
        for turn in (1, 2, 3):
            other = w.rank ^ turn
            if w.t == self.last - 1 and {w.rank, other} == {1, 2}:
                await w.sleep(0.5)
            w.x = await w.mean(w.x, among=(min(w.rank, other), max(w.rank, other)))
        w.x -= 0.1 * g
        w.v += 1


def hyper_of(scheme: str) -> dict[str, Any]:
    return {"window": 7} if "window" in getattr(discovery.scheme(scheme), "__dataclass_fields__", {}) else {}


def check(directory: Path, workers: int) -> None:
    """All workers have ended with the same step, and replay gives what was saved."""
    saved = checkpoint.newest(directory / "checkpoints", lambda _: None)
    assert saved is not None
    assert len({int(saved.tensors[f"person.{rank}"][0]) for rank in range(workers)}) == 1
    assert {int(saved.tensors[f"worker.{rank}.v"]) for rank in range(workers)} == {saved.step}
    assert audit(directory) == []


@pytest.mark.parametrize("collective", ["shared", "tcp"])
def test_the_run_ends_when_every_worker_has_made_the_last_update(collective: str, tmp_path: Path) -> None:
    story = run(tmp_path / "run", "digits-mlp", LatePairs(), workers=4, steps=5, collective=collective)
    assert story.error is None, story.logs()
    assert story.result is not None
    assert story.result.updates == 5, story.said
    assert story.result.digest == simulate("digits-mlp", LatePairs(), workers=4, steps=5).digest
    saved = checkpoint.newest(tmp_path / "run" / "checkpoints", lambda _: None)
    assert saved is not None
    assert {int(saved.tensors[f"worker.{rank}.v"]) for rank in range(4)} == {5}


def test_a_checkpoint_of_a_run_with_an_absent_worker_is_of_one_update(tmp_path: Path) -> None:
    """Without a server, who is restarted takes over another's cells; a resume from a checkpoint must do the same."""
    settings: dict[str, Any] = {"workers": 2, "hyper": {"window": 2}, "checkpoint_steps": 1, "keep": 10_000}
    story = run(tmp_path / "run", "digits-mlp", "averaging", steps=300, kills=["worker:1"] * 3, **settings)
    assert story.error is None, story.logs()
    for path in sorted((tmp_path / "run" / "checkpoints").glob("[0-9]*")):
        saved = checkpoint.load(path)
        assert {int(saved.tensors[f"worker.{rank}.v"]) for rank in range(2)} == {saved.step}
        assert torch.equal(saved.tensors["worker.1.x"], saved.tensors["model"])


@dataclass(frozen=True)
class PairsThenAll(Scheme, name="pairs-then-all"):
    """Means of two workers at a time, then one of all gradients."""

    async def step(self, w: Worker) -> None:
        g = await w.grad(w.x)
        for turn in (1, 2, 3):
            other = w.rank ^ turn
            w.x = await w.mean(w.x, among=(min(w.rank, other), max(w.rank, other)))
        g = await w.mean(g)
        w.x -= 0.1 * g
        w.v += 1


def test_means_of_groups_that_overlap_have_the_simulators_bits(tmp_path: Path) -> None:
    """A worker may be at its next mean but one while a member of the first still reads what it brought."""
    expected = simulate("quadratic", PairsThenAll(), workers=4, steps=60).digest
    for number in range(4):
        story = run(tmp_path / str(number), "quadratic", PairsThenAll(), workers=4, steps=60)
        assert story.result is not None, story.logs()
        assert story.result.digest == expected


@pytest.mark.parametrize("how", ["seconds", "interrupt", "hook"])
@pytest.mark.parametrize("scheme", SERVERLESS)
def test_without_a_server_all_end_with_the_same_step(scheme: str, how: str, tmp_path: Path) -> None:
    workers = 1 if discovery.scheme(scheme).alone else 3
    settings: dict[str, Any] = {"workers": workers, "hyper": hyper_of(scheme), "checkpoint_seconds": 60.0}
    if how == "seconds":
        settings["seconds"] = 0.5
    elif how == "interrupt":
        settings["watch"] = Interrupts(10)
    else:
        settings["hooks"] = [StopsAt(73)]
    with leaving_nothing():
        story = run(tmp_path / "run", "digits-mlp", scheme, **settings)
    assert isinstance(story.error, KeyboardInterrupt) if how == "interrupt" else story.error is None, story.error
    check(tmp_path / "run", workers)
    if scheme == "averaging":  # the mean, and not what one worker had made of it since
        saved = checkpoint.newest(tmp_path / "run" / "checkpoints", lambda _: None)
        assert saved is not None
        for rank in range(workers):
            assert torch.equal(saved.tensors[f"worker.{rank}.x"], saved.tensors["model"])


def test_a_worker_that_is_not_back_at_the_end_takes_over_what_was_saved(tmp_path: Path) -> None:
    killed: list[int] = []

    def kill_and_interrupt(status: Status) -> None:
        pid = next(role.pid for role in status.roles if role.name == "worker:1")
        if status.updates >= 10 and not killed:
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGINT)

    with leaving_nothing():
        story = run(
            tmp_path / "run", "digits-mlp", "averaging", workers=3, hyper={"window": 7}, watch=kill_and_interrupt
        )
    assert killed
    assert isinstance(story.error, KeyboardInterrupt), story.logs()
    check(tmp_path / "run", 3)


def test_a_stop_inside_a_window_saves_no_half_of_it(tmp_path: Path) -> None:
    """A loss that is not finite stops the run at once: there is no common step to end with."""
    hooks = ["nan-guard:action=stop", Spoils(73)]
    with leaving_nothing():
        story = run(
            *(tmp_path / "run", "digits-mlp", "averaging"),
            workers=3,
            hyper={"window": 7},
            hooks=hooks,
            checkpoint_steps=3,
        )
    saved = checkpoint.newest(tmp_path / "run" / "checkpoints", lambda _: None)
    assert saved is not None
    told = story.result or getattr(story.error, "result", None)
    assert told is not None, story.logs()
    assert told.updates == saved.step
    for rank in range(3):
        assert torch.equal(saved.tensors[f"worker.{rank}.x"], saved.tensors["model"])


def test_resumed_from_such_a_stop(tmp_path: Path) -> None:
    run(tmp_path / "run", "digits-mlp", "averaging", workers=3, hyper={"window": 7}, watch=Interrupts(10))
    story = run(tmp_path / "run", "digits-mlp", "averaging", workers=3, hyper={"window": 7}, steps=40, resume=True)
    assert story.error is None, story.logs()
    told = replay(tmp_path / "run")
    assert told.match, told.difference
    check(tmp_path / "run", 3)
