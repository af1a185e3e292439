"""What the tests here hold the schemes against: written from the papers, with nothing of the schemes' own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heapreplace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline import Result, Task, TorchTask, simulate
from paceline.compute_times import parse_times
from paceline.config import discovery
from paceline.config.build import scheme_of
from paceline.sampling import mixed
from paceline.simulator.cost import Cost
from paceline.simulator.engine import SimulationEngine
from paceline.tasks.quadratic import quadratic

SEED = 5
EXACT = {"rtol": 0.0, "atol": 1e-10}
SCHEMES = {
    name: found.value for name, found in discovery.schemes().items()
}  # found once: the folder is read every time


def bowl(dim: int = 23, noise: float = 0.3, dtype: str = "float64", **options: Any) -> Task:
    """A noisy quadratic of condition 10, with its own optimum for every worker."""
    options = {"condition": 10.0, "heterogeneity": 0.5} | options
    return quadratic(dim=dim, noise=noise, dtype=dtype, **options)


def line(curvature: float = 1.0) -> Task:
    """One dimension, no noise: the ground of the stability limits."""
    return quadratic(dim=1, curvature=curvature, dtype="float64")


def network(dtype: torch.dtype = torch.float64, batch: int = 12) -> Task:
    """A small network on made-up data; 67 parameters, so that no vector length divides them evenly."""
    generator = torch.Generator().manual_seed(11)
    rows = torch.randn(120, 4, generator=generator, dtype=dtype)
    labels = (rows[:, 0] * rows[:, 1] + rows[:, 2]).sign().long().add(1)
    return TorchTask(
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
        nn.functional.cross_entropy,
        (rows, labels),
        batch=batch,
        dtype=dtype,
        name="network",
    )


def run(task: str | Task, scheme: str, workers: int, steps: int, **options: Any) -> Result:
    """A simulation that says its warnings to nobody; `server_rule` stands for `server.rule`."""
    words = {key.replace("server_", "server."): value for key, value in options.items()}
    return simulate(task, SCHEMES[scheme], workers=workers, steps=steps, **{"seed": SEED, "warn": ignored} | words)


def ignored(text: str) -> None:
    """For runs that cross a limit on purpose."""


def engine(task: Task, scheme: str, workers: int, compute: str = "constant:1", **hyper: Any) -> SimulationEngine:
    """The simulator itself, where a test looks at the workers or puts them somewhere first."""
    cost = Cost(compute_law=parse_times(compute))
    return SimulationEngine(task, scheme_of(SCHEMES[scheme], hyper), workers=workers, seed=SEED, cost=cost)


class Gradients:
    """Worker `rank`'s gradients in the order of its mini-batches: `g(x)`."""

    def __init__(self, task: Task, rank: int = 0, workers: int = 1, seed: int = SEED) -> None:
        self._task, self._batches = task, task.batches(rank, workers, seed)

    def __call__(self, x: Tensor) -> Tensor:
        return self._task.grad(x.clone(), next(self._batches), torch.empty_like(x))[1]


def crew(task: Task, workers: int) -> list[Gradients]:
    return [Gradients(task, rank, workers) for rank in range(workers)]


def descent(task: Task, steps: int, lr: float, rank: int = 0, workers: int = 1) -> Tensor:
    """x <- x - lr * g"""
    x, g = task.start(SEED), Gradients(task, rank, workers)
    for _ in range(steps):
        x = x.add(g(x), alpha=-lr)
    return x


def by_torch(task: Task, steps: int, make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Tensor:
    """Sequential training with one of torch's own optimisers."""
    x, g = nn.Parameter(task.start(SEED)), Gradients(task)
    optimiser = make([x])
    for _ in range(steps):
        x.grad = g(x.detach())
        optimiser.step()
    return x.detach()


def path(task: Task, scheme: str, workers: int, steps: int, **options: Any) -> list[Tensor]:
    """The centre at the start and after every update."""
    points = [task.start(SEED)]
    run(task, scheme, workers, steps, watch=lambda e: points.append(e.centre.x.clone()), **options)
    return points


def clocks(workers: int, seed: int = SEED) -> list[np.random.Generator]:
    """The streams that the workers' compute times are drawn from."""
    return [np.random.Generator(np.random.PCG64(mixed(seed, "compute", rank))) for rank in range(workers)]


def pushes(crews: Sequence[Sequence[int]], updates: int, window: int = 1, seed: int = SEED) -> Iterator[int]:
    """Which crew pushes next when gradients take exponential times of mean 1 and messages none.

    A crew is done when its last member has made `window` gradients; workers on their own are crews of one.
    """
    rngs = clocks(sum(map(len, crews)), seed)

    def done(crew: int, now: float) -> tuple[float, int]:
        ends = []
        for rank in crews[crew]:
            end = now
            for _ in range(window):
                end += rngs[rank].standard_exponential()
            ends.append(end)
        return max(ends), crew

    heap = [done(crew, 0.0) for crew in range(len(crews))]
    heapify(heap)
    for _ in range(updates):
        now, crew = heap[0]
        yield crew
        heapreplace(heap, done(crew, now))


def alone(workers: int) -> list[list[int]]:
    return [[rank] for rank in range(workers)]


TASKS = {
    "quadratic": bowl,
    "network": network,
    "quadratic in single": lambda: bowl(dtype="float32"),
    "network in single": lambda: network(torch.float32),
}
each_task = pytest.mark.parametrize("task", [pytest.param(make, id=name) for name, make in TASKS.items()])
in_double = pytest.mark.parametrize("task", [bowl, network])
