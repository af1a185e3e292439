"""Logistic regression: a convex problem from real data, with its curvature known."""

from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor
from torch.nn.functional import softplus

from paceline.datasets import load
from paceline.sampling import Stream, sample_seed
from paceline.state import Vector
from paceline.task import Batch, Buffers, Task
from paceline.tasks._options import real
from paceline.tasks.toy import dtype_named


class Logistic(Task):
    """mean(log(1 + exp(-y a.x))) + l2/2 |x|^2 over rows a with labels y = -1 or 1; closed-form gradient."""

    name = "logistic"
    batch = 32

    def __init__(self, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], l2: float) -> None:
        self.train, self.test, self.l2 = train, test, l2
        rows = train[0].double()
        largest: Tensor = torch.linalg.matrix_norm(rows, 2)
        self._curvature = float(largest) ** 2 / len(rows) / 4 + l2

    @property
    def epoch_size(self) -> int:  # type: ignore[override]
        return len(self.train[0])

    def start(self, seed: int) -> Vector:
        return torch.zeros_like(self.train[0][0])

    def batches(self, rank: int, workers: int, seed: int, first: int = 0) -> Iterator[Batch]:
        rows, labels = self.train
        stream = Stream(len(rows), self.batch, self.feed, self.shuffle, rank, workers, seed)

        def drawn() -> Iterator[Batch]:
            for number, indices in zip(count(first), stream.from_(first), strict=False):
                places = torch.from_numpy(indices)
                data = rows.index_select(0, places), labels.index_select(0, places)
                yield Batch(data, stream.size, sample_seed(seed, rank, number), stream.weight)

        return drawn()

    def grad(self, x: Vector, batch: Batch, out: Vector | None = None, buffers: Buffers = None) -> tuple[float, Vector]:
        rows, labels = batch.data
        margins = labels * (rows @ x)
        pull = -labels * torch.sigmoid(-margins) / len(labels)
        out = torch.mv(rows.T, pull, out=torch.empty_like(x) if out is None else out)
        out.add_(x, alpha=self.l2)
        if batch.weight != 1.0:
            out *= batch.weight
        return batch.weight * self._loss(x, margins), out

    def _loss(self, x: Vector, margins: Tensor) -> float:
        loss: Tensor = softplus(-margins).mean() + 0.5 * self.l2 * x.dot(x)
        return float(loss)

    def evaluate(self, x: Vector, buffers: Buffers = None) -> dict[str, float]:
        rows, labels = self.test
        margins = labels * (rows @ x)
        return {
            "loss": self._loss(x, margins),
            "accuracy": (margins > 0).double().mean().item(),
            "objective": self._loss(x, self.train[1] * (self.train[0] @ x)),
        }

    def curvature(self) -> float:
        return self._curvature


def logistic(l2: float = 1e-3, dtype: str = "float32") -> Task:
    """Logistic regression on breast-cancer data: convex, and its largest curvature is known.

    Data: scikit-learn's 569 tumours (455 to train on), 30 standardised measures and a constant. The weights
    start at zero; `l2`/2 |x|^2 is part of the loss. The curvature is at most lambda_max(A^T A / n)/4 + l2.
    Evaluation: loss and accuracy on the test samples, `objective` the loss on all training samples.
    """
    kind = dtype_named(dtype)
    real(kind, 0, l2=l2)
    data = load("breast-cancer")

    def table(measures: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        constant = torch.ones(len(measures), 1, dtype=measures.dtype)
        return torch.cat((measures, constant), 1).to(kind), (2 * labels - 1).to(kind)

    return Logistic(table(*data.train), table(*data.test), l2)
