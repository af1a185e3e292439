"""What a mini-batch costs the training thread: made in line, and by a thread that reads ahead. Between two batches the
thread computes a gradient, so that neither the samples nor the code are in its caches.

    python benchmarks/batches.py [--task mnist-mlp] [--batch 100] [--gradients 1000] [--rounds 5] [--json]

Prints µs of processor time and of time for a batch, and of time for batch and gradient together, medians over rounds
that alternate. The thread needs a core of its own: on a machine whose cores are busy it gains nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.table import Table

from paceline.config import build
from paceline.task import Batch, Task

WARM = 100


def measured(task: Task, batches: Iterator[Batch], gradients: int) -> tuple[float, float, float]:
    """Processor time and time of a batch, and time of a batch and its gradient, in µs."""
    x = task.start(0)
    out = torch.empty_like(x)
    for _ in range(WARM):
        task.grad(x, next(batches), out)
    used = spent = 0
    began = time.perf_counter_ns()
    for _ in range(gradients):
        used -= time.thread_time_ns()
        spent -= time.perf_counter_ns()
        batch = next(batches)
        spent += time.perf_counter_ns()
        used += time.thread_time_ns()
        task.grad(x, batch, out)
    whole = time.perf_counter_ns() - began
    return used / gradients / 1e3, spent / gradients / 1e3, whole / gradients / 1e3


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--task", default="mnist-mlp")
    options.add_argument("--batch", type=int, default=100)
    options.add_argument("--gradients", type=int, default=1000)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    torch.set_num_threads(1)
    task = build.task_of(given.task, {}).configured(batch=given.batch)
    ways = {"in line": task.prefetched(0, 2, 1), "thread": task.threaded(0, 2, 1)}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for _ in range(given.rounds):
        for name, batches in ways.items():
            found[name].append(measured(task, batches, given.gradients))
    rows = {name: [statistics.median(column) for column in zip(*rounds, strict=True)] for name, rounds in found.items()}
    if given.json:
        print(json.dumps({"task": given.task, "batch": given.batch, "rows": rows}))
        return
    table = Table(title=f"{given.task}, batch {given.batch}: µs", title_justify="left")
    for column in ("", "batch, processor", "batch", "batch and gradient"):
        table.add_column(column, justify="right" if column else "left")
    for name, row in rows.items():
        table.add_row(name, *(f"{value:.0f}" for value in row))
    Console().print(table)


if __name__ == "__main__":
    main()
