"""A session without a run: the test says what happens, the hook sees it, and what the hook does is written down."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.hook import Hook
from paceline.result import Staleness
from paceline.runtime.gradient_norm import GradientNorm
from paceline.schedules import Schedule
from paceline.state import State, Vector
from paceline.worker import Worker


class FakeSession:
    """Every member of `paceline.hook.Session`; plain attributes where a run would count."""

    def __init__(self, directory: Path | None = None, *, rank: int = 0, workers: int = 2) -> None:
        self.worker = Worker(rank, workers, State(x=torch.zeros(2)))
        self.updates = 0
        self.seconds = 0.0
        self.samples = 0
        self.bytes_sent = self.bytes_received = 0
        self.staleness = Staleness()
        self.directory = directory
        self.vector = torch.zeros(2)
        self.norm = GradientNorm()
        self.loaded: dict[str, Tensor] = {}  # of the checkpoint that the run went on from
        self.meanwhile: Callable[[], None] | None = None  # what others do while the hook waits
        self.workers_begun = 1
        self.metrics = {"loss": 1.0}
        self.said: list[str] = []
        self.recorded: list[dict[str, float]] = []
        self.saved = 0
        self.to_keep: dict[str, Tensor] = {}
        self.hyper: list[dict[str, Any]] = []
        self.waited: list[tuple[str, bool]] = []
        self.stopped: list[str] = []
        self.left: list[str] = []

    def gradient_norm(self) -> float:
        return self.norm.read()

    def model(self) -> Vector:
        return self.vector.clone()

    def trained_model(self) -> Vector:
        return self.vector.clone()

    def evaluate(self, x: Vector | None = None) -> dict[str, float]:
        return dict(self.metrics) if x is None else {"loss": float(x.sum())}

    def say(self, text: str) -> None:
        self.said.append(text)

    def record(self, values: dict[str, float]) -> None:
        self.recorded.append(values)

    def stop(self, reason: str) -> None:
        self.stopped.append(reason)

    def leave(self, reason: str) -> None:
        self.left.append(reason)

    def save(self) -> None:
        self.saved += 1

    def keep(self, name: str, tensor: Tensor) -> None:
        self.to_keep[name] = tensor

    def kept(self, name: str) -> Tensor | None:
        return self.loaded.get(name)

    def set(self, **hyper: Any) -> None:
        self.hyper.append(hyper)

    def value(self, key: str) -> Any:
        given = [Schedule.read(hyper[key]) for hyper in self.hyper if key in hyper]
        return given[-1] if given else None

    def wait(self, condition: Callable[[], bool], what: str, *, away: bool = False) -> None:
        self.waited.append((what, away))
        for _ in range(1000):
            if condition():
                return
            assert self.meanwhile is not None, f"nobody does anything while {what} is waited for"
            self.meanwhile()
        raise AssertionError(f"{what} never came")

    def begun(self) -> int:
        return self.workers_begun


def steps(hook: Hook, session: FakeSession, number: int = 1, *, updates: int = 1, seconds: float = 1.0) -> None:
    """So many steps of the worker, in each of which the run makes so many updates and takes so many seconds."""
    for _ in range(number):
        hook.before_step(session)
        session.updates += updates
        session.seconds += seconds
        session.samples += 10 * updates
        session.bytes_sent += 100 * updates
        session.bytes_received += 300 * updates
        session.worker.loss = 1 / session.updates
        if session.norm.asked:
            session.norm.measure(torch.tensor([3.0, 4.0]) * session.updates)
        hook.after_gradient(session, session.worker.loss)
        session.worker.t += 1
        hook.after_step(session)
