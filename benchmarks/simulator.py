"""What an event of the simulator costs, and whether that grows with the number of workers.

The gradient is free, so that only the simulator is measured. Figures are ratios within one run where it can be:
`python benchmarks/simulator.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from paceline.compute_times import Exponential
from paceline.config import discovery
from paceline.simulator.cost import Cost
from paceline.simulator.engine import SimulationEngine
from paceline.state import Vector
from paceline.task import Batch, Task

WORKERS = (10, 100, 1_000, 10_000)
SCHEMES = ("async", "sync", "allreduce", "downpour", "aeasgd", "groups", "hogwild")
EVENTS_EACH = 60_000


class Free(Task):
    """Four parameters and a gradient that costs nothing."""

    name = "free"

    def start(self, seed: int) -> Vector:
        return torch.zeros(4)

    def batches(self, rank: int, workers: int, seed: int, first: int = 0) -> Iterator[Batch]:
        batch = Batch((), 1)
        while True:
            yield batch

    def grad(
        self, x: Vector, batch: Batch, out: Vector | None = None, buffers: Mapping[str, Tensor] | None = None
    ) -> tuple[float, Vector]:
        assert out is not None
        return 0.0, out.fill_(1e-6)

    def evaluate(self, x: Vector, buffers: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        return {"loss": 0.0}


def microseconds_per_event(scheme: str, workers: int) -> float:
    """Past the start, so that the making of workers is not counted: a first stretch runs untimed."""
    engine = SimulationEngine(
        Free(), discovery.scheme(scheme)(), workers=workers, seed=0, cost=Cost(compute_law=Exponential(1.0))
    )
    engine.run(seconds=1.0)
    before, began, until = engine.events, time.perf_counter(), 1.0
    while engine.events - before < EVENTS_EACH:
        until += max(0.2, EVENTS_EACH / (20 * workers))
        engine.run(seconds=until)
    return (time.perf_counter() - began) / (engine.events - before) * 1e6


def main() -> None:
    torch.set_num_threads(1)
    table = Table(title="microseconds per event, free gradient, exponential times")
    table.add_column("scheme")
    for workers in WORKERS:
        table.add_column(f"{workers:,} workers", justify="right")
    table.add_column(f"{WORKERS[-1]:,} / {WORKERS[0]}", justify="right")
    for scheme in SCHEMES:
        costs = [microseconds_per_event(scheme, workers) for workers in WORKERS]
        table.add_row(scheme, *(f"{cost:.1f}" for cost in costs), f"{costs[-1] / costs[0]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
