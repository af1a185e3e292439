"""What a script's loop needs of the model: a flat vector of parameters, whatever the framework is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.state import Vector
from paceline.task import Batch, Task

Evaluate = Callable[[Any], Mapping[str, float]]


class ScriptTask(Task):
    """A script's model as a task, to start from, to compute at, to evaluate and to save. The script's loop computes the
    gradients; how they get into the vector is between the loop of a framework and its model."""

    device = torch.device("cpu")

    def __init__(self, evaluate: Evaluate | None, name: str) -> None:
        self.name, self._evaluate = name, evaluate
        self.loss: float | None = None  # of the last step, if the script gives it

    # start(), buffers() and parameters() are those of a task

    @abstractmethod
    def parameters(self) -> list[tuple[str, list[int]]]: ...

    @abstractmethod
    def standing_at(self, x: Vector, buffers: Mapping[str, Tensor] | None) -> AbstractContextManager[Any]:
        """What the script's evaluate() gets, with the parameters x; afterwards the model is as before."""

    @abstractmethod
    def settle(self, buffers: dict[str, Tensor]) -> None:
        """Use the worker's buffers in shared memory from now on."""

    @abstractmethod
    def bind(self, x: Vector, out: Vector) -> None:
        """Let the model compute at x; the gradient will go to out."""

    @abstractmethod
    def let_go(self, x: Vector | None = None, buffers: Mapping[str, Tensor] | None = None) -> None:
        """Give the model memory of its own again, with these parameters and buffers or the present ones."""

    def seed(self, seed: int) -> None:
        """Seed the random numbers of the framework; those of Python, numpy and torch are seeded."""

    def evaluate(self, x: Vector, buffers: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        """The metrics of the script's function at x; afterwards the model is as before."""
        shown = {} if self.loss is None else {"loss": self.loss}
        if self._evaluate is None:
            return shown
        with self.standing_at(x, buffers) as model:
            found = self._evaluate(model)
        if not isinstance(found, Mapping):
            raise UsageError(f"evaluate() must give metrics by name, such as {{'accuracy': 0.97}}, not {found!r}")
        return shown | {name: float(value) for name, value in found.items()}

    def batches(self, rank: int, workers: int, seed: int, first: int = 0) -> Iterator[Batch]:
        raise UsageError("the data of a script are its own")

    def grad(self, x: Vector, batch: Batch, out: Vector | None = None, buffers: Any = None) -> tuple[float, Vector]:
        raise UsageError("the gradients of a script are computed in its own loop")
