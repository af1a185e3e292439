"""A task whose gradients cost nothing: for runs of which only the times matter."""

from collections.abc import Iterator
from itertools import count

import torch

from paceline.sampling import sample_seed
from paceline.state import Vector
from paceline.task import Batch, Buffers, Task


class TimingTask(Task):
    """A vector of this length that no gradient moves. `parameters`: names and shapes, which some rules need."""

    name = "timing"

    def __init__(
        self, length: int, batch: int = 1, shapes: tuple[tuple[str, tuple[int, ...]], ...] = (), fill: float = 0.0
    ) -> None:
        self.length, self.batch, self._shapes, self._fill = length, batch, shapes, fill

    def start(self, seed: int) -> Vector:
        return torch.full((self.length,), 0.5)

    def batches(self, rank: int, workers: int, seed: int, first: int = 0) -> Iterator[Batch]:
        return (Batch((), self.batch, sample_seed(seed, rank, number)) for number in count(first))

    def grad(self, x: Vector, batch: Batch, out: Vector | None = None, buffers: Buffers = None) -> tuple[float, Vector]:
        out = torch.empty_like(x) if out is None else out
        return 0.0, out.fill_(self._fill)

    def evaluate(self, x: Vector, buffers: Buffers = None) -> dict[str, float]:
        return {"loss": 0.0}

    def parameters(self) -> list[tuple[str, list[int]]]:
        return [(name, list(shape)) for name, shape in self._shapes]

    def on(self, device: torch.device) -> "TimingTask":
        return self  # `out` is on the device already
