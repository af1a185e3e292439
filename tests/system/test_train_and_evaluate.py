"""`paceline.train_and_evaluate`: an evaluator beside the training, of one worker or of many."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import paceline
from paceline import Batch, Hook, Task, UsageError
from paceline.api.train import EvalSpec, TrainSpec, train_and_evaluate
from paceline.hook import Session
from paceline.runs import checkpoint
from paceline.state import Vector


class Finite(Task):
    """Walks towards zero; has so many mini-batches and no more."""

    name, batch = "finite", 1

    def __init__(self, batches: int) -> None:
        self.number = batches

    def start(self, seed: int) -> Vector:
        return torch.ones(2)

    def batches(self, rank: int, workers: int, seed: int, first: int = 0) -> Iterator[Batch]:
        for number in count(first):
            if number == self.number:
                return
            yield Batch((), 1, number)

    def grad(
        self, x: Vector, batch: Batch, out: Vector | None = None, buffers: Mapping[str, Tensor] | None = None
    ) -> tuple[float, Vector]:
        out = torch.empty_like(x) if out is None else out
        out.copy_(x)
        return float(x.square().sum()), out

    def evaluate(self, x: Vector, buffers: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        return {"loss": float(x.square().sum())}


def quiet(text: str) -> None: ...


@pytest.mark.parametrize(("scheme", "workers", "updates"), [("sgd", 1, 30), ("async", 3, 90)])
def test_it_ends_when_the_data_run_out(scheme: str, workers: int, updates: int, tmp_path: Path) -> None:
    spec = TrainSpec(Finite(30), scheme, max_steps=1_000_000)
    result = train_and_evaluate(spec, workers=workers, directory=tmp_path, say=quiet)
    assert result.updates == updates
    assert result.history[-1].update == updates
    assert result.history[-1].metrics == result.metrics
    best = checkpoint.best(tmp_path)
    assert best is not None
    assert (best.metric, best.step) == ("loss", updates)  # it always falls


@dataclass
class Slowly(Hook, name="slowly"):
    """A step takes a while: several evaluations fit into the run."""

    seconds: float = 0.01

    def before_step(self, session: Session) -> None:
        signal.sigtimedwait([], self.seconds)


def test_training_and_evaluation_side_by_side(tmp_path: Path) -> None:
    spec = TrainSpec("digits-mlp", "downpour", max_steps=60, hooks=(Slowly(),), hyper={"lr": 0.2})
    evaluation = EvalSpec(steps=3, metric="loss")
    settings: dict[str, Any] = {"workers": 2, "checkpoint_steps": 10, "say": quiet}
    result = train_and_evaluate(spec, evaluation, directory=tmp_path, **settings)
    points = [point for point in result.history if "loss" in point.metrics]
    assert points[-1].update == result.updates == 60
    assert len(points) >= 3
    assert all((point.metrics["accuracy"] * 96).is_integer() for point in points)  # three batches of 32
    assert result.hyper["lr"] == 0.2
    best = checkpoint.best(tmp_path)
    assert best is not None
    assert (best.metric, best.value) == ("loss", min(point.metrics["loss"] for point in points))


def test_one_worker_and_evaluations_far_apart(tmp_path: Path) -> None:
    spec = TrainSpec("digits-mlp", "sgd", max_steps=60)
    far = EvalSpec(throttle=60.0)
    result = train_and_evaluate(spec, far, directory=tmp_path, checkpoint_steps=5, say=quiet)
    assert result.workers == 1
    updates = [point.update for point in result.history]
    assert len(updates) <= 2
    assert updates[-1] == 60
    assert result.digest == paceline.simulate("digits-mlp", "sgd", steps=60).digest


def test_a_task_without_samples_cannot_be_evaluated_in_part(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="omit eval_steps"):
        train_and_evaluate(TrainSpec("toy", "sgd", max_steps=5), EvalSpec(steps=1), directory=tmp_path, say=quiet)
