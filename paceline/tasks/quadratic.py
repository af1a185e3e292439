"""Quadratic functions with known curvature, noise, differences between workers, and optimum."""

from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.sampling import mixed, portion, sample_seed
from paceline.state import Vector
from paceline.task import Batch, Buffers, Task
from paceline.tasks._options import positive, real, whole
from paceline.tasks.toy import dtype_named


class Quadratic(Task):
    """f_i(x) = 1/2 (x - s_i)^T H_i (x - s_i) for worker i, H_i diagonal; see `quadratic`."""

    name = "quadratic"
    batch = 1

    def __init__(
        self,
        spectrum: Tensor,
        noise: float,
        heterogeneity: float,
        curvatures: tuple[float, ...],
        centres: tuple[float, ...],
    ) -> None:
        self.noise, self.heterogeneity = noise, heterogeneity
        self.heterogeneous = heterogeneity > 0 or len(set(centres)) > 1
        self.given = max(len(curvatures), len(centres))  # 0: any number of workers
        dim, dtype = len(spectrum), spectrum.dtype
        ones = torch.ones(dim, dtype=dtype)
        self.spectra = [h * ones for h in curvatures] or [spectrum]
        self.centres = [s * ones for s in centres] or [0 * ones]
        pairs = [(self._spectrum(i), self._given_centre(i)) for i in range(max(1, self.given))]
        total = sum((h for h, _ in pairs), torch.zeros_like(ones))
        self.mean = total / len(pairs)
        self.best = sum((h * s for h, s in pairs), torch.zeros_like(ones)) / total
        self._out = torch.empty_like(ones)
        self._centroids: dict[int, Tensor] = {}

    def _spectrum(self, rank: int) -> Tensor:
        return self.spectra[rank % len(self.spectra)]

    def _given_centre(self, rank: int) -> Tensor:
        return self.centres[rank % len(self.centres)]

    def _offset(self, rank: int) -> Tensor:
        """The optimum of worker `rank`'s own data, before the mean over the workers is subtracted."""
        return self.heterogeneity * self._normal(mixed("quadratic centre", rank))

    def _normal(self, seed: int) -> Tensor:
        return torch.randn(len(self.mean), generator=torch.Generator().manual_seed(seed), dtype=self.mean.dtype)

    def centre(self, rank: int, workers: int) -> Vector:
        """s_i: the optimum of worker `rank` if it trained alone."""
        if not self.heterogeneity:
            return self._given_centre(rank)
        if workers not in self._centroids:
            self._centroids[workers] = torch.stack([self._offset(r) for r in range(workers)]).mean(0)
        return self._offset(rank) - self._centroids[workers]

    def start(self, seed: int) -> Vector:
        return self._normal(mixed("quadratic start", seed))

    def batches(self, rank: int, workers: int, seed: int, first: int = 0) -> Iterator[Batch]:
        if self.given not in (0, workers):
            raise UsageError(f"the task describes {self.given} workers one by one, but there are {workers}")
        _, size, weight = portion(self.batch, self.feed, rank, workers)
        data = (self._spectrum(rank), self.centre(rank, workers))
        return (Batch(data, size, sample_seed(seed, rank, number), weight) for number in count(first))

    def grad(self, x: Vector, batch: Batch, out: Vector | None = None, buffers: Buffers = None) -> tuple[float, Vector]:
        out = self._out if out is None else out
        h, s = batch.data
        apart = torch.sub(x, s)
        torch.mul(h, apart, out=out)
        loss = 0.5 * torch.dot(out, apart).item()
        if self.noise:
            out.add_(self._normal(batch.seed), alpha=self.noise / batch.size**0.5)
        if batch.weight != 1.0:
            out *= batch.weight
        return batch.weight * loss, out

    def evaluate(self, x: Vector, buffers: Buffers = None) -> dict[str, float]:
        apart = (x - self.best).double()
        loss = 0.5 * torch.dot(self.mean.double() * apart, apart).item()
        return {"loss": loss, "distance": apart.norm().item()}

    def curvature(self) -> float:
        return max(h.max().item() for h in self.spectra)


def quadratic(
    dim: int = 10,
    noise: float = 0.0,
    condition: float = 1.0,
    heterogeneity: float = 0.0,
    curvature: float = 1.0,
    curvatures: tuple[float, ...] = (),
    centres: tuple[float, ...] = (),
    dtype: str = "float32",
) -> Task:
    """A quadratic bowl with chosen noise, condition and differences between workers; its optimum is known.

    Worker i has f_i(x) = 1/2 (x - s_i)^T H (x - s_i); the objective is the mean over the workers. H is
    diagonal, with `dim` eigenvalues spaced evenly in the logarithm from curvature/condition to curvature.
    Gradients carry Gaussian noise of standard deviation noise/sqrt(batch) in every coordinate. The start is
    standard normal.

    heterogeneity: the s_i are drawn with this standard deviation (worker i's own are always the same) and
    then shifted so that their mean is zero. So every s_i depends on the number of workers, but the optimum
    does not: it is the origin for every number of workers.

    curvatures, centres: instead, one number per worker, giving f_i(x) = h_i/2 |x - s_i|^2; the number of
    workers must be the same. Without `centres` all lie at the origin, without `curvatures` all have H. The
    optimum is sum(h_i s_i) / sum(h_i).

    Evaluation: `loss` is the objective above its least value, `distance` that of x to the optimum.
    """
    kind = dtype_named(dtype)
    whole(1, dim=dim)
    real(kind, 1, condition=condition)
    real(kind, 0, noise=noise, heterogeneity=heterogeneity)
    positive(kind, curvature=curvature, **{f"curvatures[{i}]": h for i, h in enumerate(curvatures)})
    positive(kind, **{"curvature/condition": curvature / condition})  # the least eigenvalue
    real(kind, **{f"centres[{i}]": s for i, s in enumerate(centres)})
    if curvatures and centres and len(curvatures) != len(centres):
        raise UsageError(f"curvatures and centres must be equally many, not {len(curvatures)} and {len(centres)}")
    if (curvatures or centres) and heterogeneity:
        raise UsageError("give heterogeneity, or the workers' own curvatures and centres, not both")
    if curvatures and condition != 1:
        raise UsageError("condition shapes one common H; it says nothing when each worker has its own curvature")
    steps = torch.linspace(0.0, 1.0, dim, dtype=torch.float64) if dim > 1 else torch.ones(1, dtype=torch.float64)
    spectrum = curvature * condition ** (steps - 1.0)
    return Quadratic(spectrum.to(kind), noise, heterogeneity, curvatures, centres)
