"""What patience is for: processes that hang are found, processes that work are waited for. Data: random numbers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from nodes import nodes
from processes import finished, leaving_nothing, run, until
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.hook import Hook, Session
from paceline.processes.supervisor import supervisor
from paceline.processes.supervisor.status import Status
from paceline.result import Result
from paceline.state import Vector
from paceline.torch_task import TorchTask


def here() -> str:
    """The role that this process plays."""
    return Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode().removeprefix("paceline role ")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))


class Staged(TorchTask):
    """Random numbers, with something that happens first where the test says so."""

    def __init__(self, **first: Callable[[], object]) -> None:
        inputs = torch.randn(90, 5, generator=torch.Generator().manual_seed(1))
        super().__init__(net, cross_entropy, (inputs, torch.arange(90) % 3), batch=16, name="staged")
        self.first = first

    def start(self, seed: int) -> Vector:
        self.first.get("start", lambda: None)()
        return super().start(seed)

    def evaluate(self, x: Vector, buffers: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        self.first.get("evaluate", lambda: None)()
        return super().evaluate(x, buffers)


def slowly() -> None:
    """Longer than patience, and without any work that could be seen."""
    threading.Event().wait(3)


@pytest.mark.parametrize(("scheme", "settings"), [("sync", {}), ("allreduce", {}), ("async", {"evaluator": True})])
def test_the_last_evaluation_may_outlast_patience(scheme: str, settings: dict[str, Any], tmp_path: Path) -> None:
    task = Staged(evaluate=slowly)
    with leaving_nothing():
        story = run(tmp_path / "run", task, scheme, workers=2, steps=4, patience=1.0, **settings)
    result = finished(story, 4, over=1)
    assert result.metrics
    assert story.seconds > 3


def test_an_interrupted_run_does_not_wait_longer_than_patience_for_its_last_evaluation(tmp_path: Path) -> None:
    asked = False

    def watch(status: Status) -> None:
        nonlocal asked
        if status.updates > 20 and not asked:
            asked = True
            os.kill(os.getpid(), signal.SIGINT)

    forever = Staged(evaluate=lambda: threading.Event().wait())
    with leaving_nothing():
        story = run(tmp_path / "run", forever, "async", workers=2, steps=1_000_000, patience=2.0, watch=watch)
    assert isinstance(story.error, KeyboardInterrupt)
    told = story.directory.result()
    assert told is not None
    assert told["updates"] > 20
    assert not told["metrics"]


@dataclass
class Hangs(Hook):
    """The first process of this worker never gets to its first step."""

    rank: int
    marker: Path

    def begin(self, session: Session) -> None:
        if session.worker.rank == self.rank and not self.marker.exists():
            self.marker.touch()
            threading.Event().wait()


@pytest.mark.parametrize(("scheme", "rank"), [("sync", 1), ("async", 0), ("allreduce", 1)])
def test_a_role_that_hangs_before_its_first_step_is_restarted(scheme: str, rank: int, tmp_path: Path) -> None:
    hook = Hangs(rank, tmp_path / "marker")
    with leaving_nothing():
        story = run(tmp_path / "run", Staged(), scheme, workers=2, steps=20, patience=1.5, hooks=[hook])
    finished(story, 20, over=1)
    name = f"worker:{rank}" if rank else "chief"
    assert story.told(f"{name} hangs: no progress for 1.5 s")


def test_so_is_one_on_another_node(tmp_path: Path) -> None:
    hook = Hangs(1, tmp_path / "marker")
    with leaving_nothing(), nodes() as made:
        story = run(
            tmp_path / "run",
            Staged(),
            "sync",
            workers=2,
            steps=20,
            patience=3.0,
            hooks=[hook],
            launcher=made.launcher,
        )
        for part in list(made.agents):
            made.wait(part)
    finished(story, 20)
    assert story.told("worker:1 hangs: no progress for 3 s before its first step")


BIG = """
import torch
from torch import nn
from paceline import TorchTask
{threads}
def task():
    inputs = torch.randn(4096, 256, generator=torch.Generator().manual_seed(0))
    inputs = inputs @ torch.eye(256) + 0  # large enough for torch to use all the threads that it may
    labels = (inputs.sum(1) > 0).long()
    return TorchTask(lambda: nn.Linear(256, 2), nn.CrossEntropyLoss(), (inputs, labels), batch=2048, name="big")
"""


@pytest.mark.parametrize(("threads", "own"), [(1, ""), (2, ""), (4, ""), (2, "torch.set_num_threads(2)")])
def test_threads_of_torch_work_in_forked_processes(threads: int, own: str, tmp_path: Path) -> None:
    (tmp_path / "big.py").write_text(BIG.format(threads=own))
    words = ["train", "big.py:task", "-s", "sync", "-n", "2", "--steps", "10", "--threads", str(threads), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert ("--start exec" in done.stderr) == bool(own)


# deaths of the evaluator


def killing(name: str, times: int, gate: Path) -> Callable[[Status], None]:
    """Kill a role each time that a new process plays it; then open a gate."""
    killed: list[int] = []

    def watch(status: Status) -> None:
        pid = next(role.pid for role in status.roles if role.name == name)
        if pid and pid not in killed:
            if len(killed) == times:
                gate.touch()
                return
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    return watch


@dataclass
class Until(Hook):
    """No step is made before the gate is open."""

    gate: Path

    def before_step(self, session: Session) -> None:
        session.wait(self.gate.exists, "the gate")


def test_an_evaluator_that_dies_often_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.01)
    gate = tmp_path / "gate"
    with leaving_nothing():
        story = run(
            tmp_path / "run",
            Staged(),
            "async",
            workers=2,
            steps=30,
            evaluator=True,
            restarts=2,
            hooks=[Until(gate)],
            watch=killing("evaluator", 6, gate),
        )
    result = finished(story, 30, over=1)
    assert result.restarts == 6
    assert story.told("evaluator died (signal SIGKILL)", "restarting it in 0.16 s")  # the pause has grown
    assert result.history[-1].update == result.updates  # the last one has evaluated the end


def broken_for_the_evaluator() -> None:
    if here() == "evaluator":
        raise ValueError("no such class")


def test_an_evaluator_that_fails_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.01)
    task = Staged(evaluate=broken_for_the_evaluator)
    with leaving_nothing():
        story = run(tmp_path / "run", task, "sync", workers=2, steps=20, evaluator=True, restarts=1)
    result = finished(story, 20)
    assert result.metrics  # the chief's
    assert story.told("evaluator died (ValueError: no such class)")
    assert any("not evaluated" in text for text in result.warnings)


# deaths before the chief is ready


def undisturbed_and_killed(tmp_path: Path, scheme: str, name: str, **settings: Any) -> tuple[Result, Result]:
    given: dict[str, Any] = {"workers": 3, "steps": 12, "summaries": False} | settings
    expected = finished(run(tmp_path / "whole", Staged(), scheme, **given), 12)
    gate = tmp_path / "gate"

    def hold() -> None:
        if here() == "chief":
            until(gate.exists, 30, "the death of another")

    with leaving_nothing():
        story = run(tmp_path / "killed", Staged(start=hold), scheme, watch=killing(name, 2, gate), **given)
    found = finished(story, 12)
    assert found.restarts == 2
    return expected, found


@pytest.mark.parametrize("name", ["worker:1", "worker:2"])
@pytest.mark.parametrize("scheme", ["averaging", "allreduce", "sync"])
def test_a_death_before_the_chief_is_ready_changes_no_bit_of_an_exact_run(
    scheme: str, name: str, tmp_path: Path
) -> None:
    expected, found = undisturbed_and_killed(tmp_path, scheme, name, exact=True, micro=6)
    assert found.digest == expected.digest
    assert found.metrics == expected.metrics
    assert found.rolled_back_updates == 0


@pytest.mark.parametrize("scheme", ["averaging", "sync"])
def test_nor_of_one_with_a_process_for_each_worker(scheme: str, tmp_path: Path) -> None:
    expected, found = undisturbed_and_killed(tmp_path, scheme, "worker:1")
    assert found.digest == expected.digest
    assert found.gradients == expected.gradients
