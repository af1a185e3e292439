"""The guide's problem: small enough to compute by hand."""

from collections.abc import Iterator
from itertools import count

import torch

from paceline.errors import UsageError
from paceline.sampling import portion, sample_seed
from paceline.state import Vector
from paceline.task import Batch, Buffers, Task

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def dtype_named(name: str) -> torch.dtype:
    """The number type that a task option names."""
    if name not in DTYPES:
        raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, not {name!r}")
    return DTYPES[name]


class Toy(Task):
    """mean((a + b - 100)^2) for a and b in R^2, with the gradient in closed form."""

    name = "toy"
    batch = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def start(self, seed: int) -> Vector:
        return torch.zeros(4, dtype=self.dtype)

    def batches(self, rank: int, workers: int, seed: int, first: int = 0) -> Iterator[Batch]:
        _, size, weight = portion(self.batch, self.feed, rank, workers)
        return (Batch((), size, sample_seed(seed, rank, number), weight) for number in count(first))

    def grad(self, x: Vector, batch: Batch, out: Vector | None = None, buffers: Buffers = None) -> tuple[float, Vector]:
        out = torch.empty_like(x) if out is None else out
        miss = x[:2] + x[2:] - 100.0
        torch.cat((miss, miss), out=out)
        if batch.weight != 1.0:
            out *= batch.weight
        return batch.weight * miss.square().mean().item(), out

    def evaluate(self, x: Vector, buffers: Buffers = None) -> dict[str, float]:
        miss = x[:2] + x[2:] - 100.0
        return {"loss": miss.square().mean().item(), "distance": (miss.norm() / 2**0.5).item()}

    def curvature(self) -> float:
        return 2.0


def toy(dtype: str = "float32") -> Task:
    """Two vectors that should add up to 100: the guide's problem.

    x = (a0, a1, b0, b1) from zero, loss mean((a + b - 100)^2). The gradient with respect to a and to b is
    a + b - 100, so one step of SGD at rate eta multiplies a + b - 100 by 1 - 2 eta: its curvature is 2.
    There are no data. `distance`: of x to the nearest solution.
    """
    return Toy(dtype_named(dtype))
