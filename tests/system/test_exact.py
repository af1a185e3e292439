"""Exact runs: one digest, in any number of processes, whichever role is killed, wherever the run was ended and resumed.

Data: scikit-learn's digits, and random numbers.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from processes import finished, leaving_nothing, run
from torch import nn
from torch.nn.functional import cross_entropy

from paceline import simulate
from paceline.errors import PacelineError
from paceline.hook import Hook, Role, Session
from paceline.processes.supervisor.status import Status
from paceline.result import Result
from paceline.torch_task import TorchTask

TASK = "digits-mlp"
BATCH = 50  # which 8 does not divide, as 3 and 5 do not divide 8
STEPS = 24
SCHEMES: dict[str, dict[str, Any]] = {
    "sync": {"rule": "momentum"},
    "allreduce": {"rule": "adam", "lr": 0.01},
    "sagn": {"window": 2, "rule": "momentum", "server_rule": "momentum"},
    "easgd": {"window": 3, "rule": "momentum"},
    "averaging": {"window": 2, "rule": "momentum"},
    "groups": {"size": 8},
    "d-psgd": {"rule": "momentum"},
    "ad-psgd": {},
}
SERVED = ("sync", "sagn", "groups")


def virtual(scheme: str, steps: int = STEPS, **settings: Any) -> Result:
    given = {"batch": BATCH, "seed": 3} | SCHEMES[scheme] | settings
    return simulate(given.pop("task", TASK), scheme, exact=True, steps=steps, warn=lambda _: None, **given)


def real(directory: Path, scheme: str, workers: int, steps: int = STEPS, **settings: Any) -> Result:
    given = {"batch": BATCH, "seed": 3, "hyper": SCHEMES[scheme], "summaries": False} | settings
    task = given.pop("task", TASK)
    return finished(run(directory, task, scheme, exact=True, workers=workers, steps=steps, **given), steps)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_digest_in_any_number_of_processes(scheme: str, tmp_path: Path) -> None:
    expected = virtual(scheme)
    crews = [(1, 1), (3, 2), (8, 1)] if scheme in SERVED else [(1, 1), (2, 1), (5, 1)]
    for workers, servers in crews:
        found = real(tmp_path / f"{workers}-{servers}", scheme, workers, servers=servers)
        assert (found.digest, found.metrics) == (expected.digest, expected.metrics)
        assert (found.workers, found.micro) == (workers, 8)
        assert (found.gradients, found.samples) == (expected.gradients, expected.samples)
    plain = dict(SCHEMES[scheme])
    fixed = simulate(
        TASK, scheme, workers=8, feed="slice", batch=BATCH, seed=3, steps=STEPS, warn=lambda _: None, **plain
    )
    assert fixed.digest == expected.digest


def test_other_micro_batches_are_another_run(tmp_path: Path) -> None:
    expected = virtual("allreduce", micro=5)
    assert real(tmp_path / "run", "allreduce", 2, micro=5).digest == expected.digest
    assert expected.digest != virtual("allreduce").digest


def noisy() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Dropout(0.3), nn.Linear(7, 3))


def noisy_task() -> TorchTask:
    inputs = torch.randn(90, 5, generator=torch.Generator().manual_seed(1))
    return TorchTask(noisy, cross_entropy, (inputs, torch.arange(90) % 3), batch=19, name="noisy")


@pytest.mark.parametrize("scheme", ["sync", "allreduce", "averaging"])
def test_dropout_and_the_statistics_of_batches(scheme: str, tmp_path: Path) -> None:
    """Both are the worker's own, though the module that draws and counts is one for all workers of a process."""
    expected = virtual(scheme, task=noisy_task(), batch=None)
    for workers in (1, 3):
        found = real(tmp_path / str(workers), scheme, workers, task=noisy_task(), batch=None, every=3)
        assert found.digest == expected.digest
        assert found.metrics == expected.metrics  # which the averaged statistics go into


def test_each_role_in_an_interpreter_of_its_own(tmp_path: Path) -> None:
    assert real(tmp_path / "run", "sync", 1, start="exec").digest == virtual("sync").digest


def test_a_process_is_one_row(tmp_path: Path) -> None:
    seen: list[Status] = []
    real(tmp_path / "run", "sync", 3, watch=seen.append, steps=100)
    assert {tuple(role.name for role in status.roles) for status in seen} == {
        ("chief", "worker:1", "worker:2", "server:0")
    }
    assert all(status.roles[0].step <= 100 for status in seen)


# deaths


@dataclass
class Dies(Hook):
    """Kills its own process, all of its workers with it, once."""

    mark: Path
    rank: int
    step: int
    where: str
    roles: ClassVar[frozenset[Role]] = frozenset({"chief", "worker"})

    def _here(self, where: str, session: Session) -> None:
        if (where, session.worker.rank, session.worker.t) == (self.where, self.rank, self.step):
            try:
                self.mark.touch(exist_ok=False)
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)

    def before_step(self, session: Session) -> None:
        self._here("before", session)

    def after_gradient(self, session: Session, loss: float) -> None:
        self._here("gradient", session)

    def after_step(self, session: Session) -> None:
        self._here("after", session)


# two processes at once; where all stand for the checkpoint that is asked for after step 12; the chief
MOMENTS = [(1, 5, "gradient"), (2, 5, "gradient"), (2, 14, "before"), (0, 14, "after"), (3, 17, "gradient")]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_killed_process_changes_no_bit(scheme: str, tmp_path: Path) -> None:
    expected = virtual(scheme)
    hooks = [Dies(tmp_path / f"{rank}-{step}", rank, step, where) for rank, step, where in MOMENTS]
    with leaving_nothing():
        found = real(tmp_path / "run", scheme, 3, hooks=hooks, checkpoint_steps=12, restarts=9)
    assert all(hook.mark.exists() for hook in hooks)
    assert (found.digest, found.metrics) == (expected.digest, expected.metrics)
    assert (found.gradients, found.samples) == (expected.gradients, expected.samples)
    assert found.restarts == len(MOMENTS)
    assert found.rolled_back_updates


@pytest.mark.parametrize(("scheme", "servers"), [("sync", 2), ("sagn", 1), ("allreduce", 1), ("ad-psgd", 1)])
def test_killed_at_any_moment(scheme: str, servers: int, tmp_path: Path) -> None:
    kills = ["worker:1", *(["server:0"] if scheme in SERVED else []), "chief", "worker:2"]
    settings: dict[str, Any] = {"servers": servers, "checkpoint_steps": 15, "kills": kills}
    with leaving_nothing():
        found = real(tmp_path / "run", scheme, 3, 120, **settings)
    assert found.restarts == len(kills)
    assert found.digest == virtual(scheme, 120).digest


def test_a_schedule_is_kept_to_over_a_death(tmp_path: Path) -> None:
    schedule = "learning-rate:base=0.2,kind=cosine,over=30"
    calm = real(tmp_path / "calm", "sync", 8, hooks=[schedule])
    assert calm.digest != virtual("sync").digest
    dies = Dies(tmp_path / "mark", 1, 20, "gradient")
    found = real(tmp_path / "faults", "sync", 2, hooks=[schedule, dies], checkpoint_steps=8)
    assert (found.restarts, found.digest) == (1, calm.digest)


# ended and gone on with


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gone_on_with_in_other_processes(scheme: str, tmp_path: Path) -> None:
    first = real(tmp_path / "run", scheme, 3, 11)
    assert first.digest == virtual(scheme, 11).digest
    second = real(tmp_path / "run", scheme, 2, servers=2 if scheme in SERVED else 1, resume=True)
    assert second.digest == virtual(scheme).digest


@pytest.mark.parametrize("scheme", ["sagn", "averaging", "easgd"])
def test_interrupted_and_gone_on_with(scheme: str, tmp_path: Path) -> None:
    """Wherever the workers are when Ctrl-C comes, they end at one step, and nothing is half done."""
    settings: dict[str, Any] = {"batch": BATCH, "seed": 3, "hyper": SCHEMES[scheme], "exact": True}

    raised: list[int] = []

    def interrupt(status: Status) -> None:
        if status.updates >= 5 and not raised:
            raised.append(status.updates)
            signal.raise_signal(signal.SIGINT)

    story = run(tmp_path / "run", TASK, scheme, workers=3, steps=100_000, watch=interrupt, **settings)
    assert isinstance(story.error, KeyboardInterrupt)
    told = story.directory.result()
    assert told is not None
    assert told["digest"] == virtual(scheme, told["updates"]).digest
    further = told["updates"] + 10
    second = real(tmp_path / "run", scheme, 2, further, resume=True)
    assert second.digest == virtual(scheme, further).digest
    assert not story.told("not exact")


def test_stopped_by_a_hook_and_gone_on_with(tmp_path: Path) -> None:
    stopping = ["stop-at-step:last_step=7"]
    story = run(
        tmp_path / "run",
        TASK,
        "sync",
        hooks=stopping,
        exact=True,
        workers=3,
        steps=STEPS,
        batch=BATCH,
        seed=3,
        hyper=SCHEMES["sync"],
    )
    assert story.result is not None
    assert 7 <= story.result.updates <= 9
    assert story.result.digest == virtual("sync", story.result.updates).digest
    assert real(tmp_path / "run", "sync", 1, resume=True).digest == virtual("sync").digest


# what goes wrong


def test_nobody_may_stand_aside(tmp_path: Path) -> None:
    hooks = ["global-step-waiter:step=5,ranks=1"]
    story = run(tmp_path / "run", TASK, "sync", hooks=hooks, exact=True, workers=2, batch=BATCH, steps=STEPS)
    assert "an exact run cannot train without a worker" in str(story.error)


@dataclass
class Raises(Hook):
    """An error in one of the workers that share a process."""

    noted: list[str] = field(default_factory=list)

    def after_gradient(self, session: Session, loss: float) -> None:
        if (session.worker.rank, session.worker.t) == (5, 3):
            raise ValueError("something of the user's")


def test_an_error_in_one_worker_ends_all(tmp_path: Path) -> None:
    with leaving_nothing():
        story = run(tmp_path / "run", TASK, "sync", hooks=[Raises()], exact=True, workers=2, batch=BATCH, steps=STEPS)
    assert isinstance(story.error, PacelineError)
    assert str(story.error) == "worker:1, step 3: ValueError: something of the user's"
