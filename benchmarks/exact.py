"""What exact runs cost: samples per second with `--exact` as a share of the plain run with as many processes.

Both share one common batch (`--feed slice`). The plain run is measured before and after every exact one, because the
machine's speed drifts. Then the two ways to add up micro-gradients that docs/decisions/0010-exact.md compares.

    python benchmarks/exact.py --rounds 3 --seconds 3
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from paceline.api.execute import execute
from paceline.config import build
from paceline.config.validate import planned
from paceline.runs.run_directory import RunDirectory
from paceline.state import mean_into
from paceline.task import Task

TASK, BATCH = "mnist-mlp", 128
SCHEMES, MICRO = ("sync", "allreduce"), (2, 4, 8)
VECTORS, LENGTH = 8, 100_000  # of the sums
REPEATS = 200


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--seconds", type=float, default=3.0)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    task = build.task_of(TASK, {}).configured(batch=BATCH)
    torch.set_num_threads(1)
    shares: dict[str, list[float]] = {}
    plain: dict[str, list[float]] = {}
    for number in range(given.rounds):
        for scheme in SCHEMES:
            before = speed(task, scheme, given.workers, given.seconds, feed="slice")
            for micro in MICRO:
                found = speed(task, scheme, given.workers, given.seconds, exact=True, micro=micro)
                after = speed(task, scheme, given.workers, given.seconds, feed="slice")
                name = f"{scheme} --micro {micro}"
                shares.setdefault(name, []).append(found / ((before + after) / 2))
                plain.setdefault(scheme, []).append(after)
                print(f"round {number + 1}: {name}: {shares[name][-1]:.3f}", file=sys.stderr, flush=True)
                before = after
    speeds = {scheme: statistics.median(one) for scheme, one in plain.items()}
    added = sums()
    if given.json:
        medians = {name: statistics.median(one) for name, one in shares.items()}
        print(json.dumps({"plain": speeds, "shares": medians, "sums": added}))
        return
    Console().print(table(shares, speeds, given.workers))
    for name, microseconds in added.items():
        print(f"{name}: {microseconds:.0f} µs for {VECTORS} vectors of {LENGTH:,} floats")


def table(shares: dict[str, list[float]], speeds: dict[str, float], workers: int) -> Table:
    told = ", ".join(f"{scheme} {one:,.0f}" for scheme, one in speeds.items())
    found = Table(title=f"{TASK}, batch {BATCH}, {workers} workers; plain samples/s: {told}", title_justify="left")
    for name in ("exact run", "share of the plain one", "least", "most"):
        found.add_column(name, justify="left" if name == "exact run" else "right")
    for name, one in shares.items():
        found.add_row(name, f"{statistics.median(one):.2f}", f"{min(one):.2f}", f"{max(one):.2f}")
    return found


def speed(task: Task, scheme: str, workers: int, seconds: float, **settings: Any) -> float:
    """Samples per second of a run."""
    plan, chosen, objects = planned(task, scheme, workers=workers, seconds=seconds, steps=None, **settings)
    with tempfile.TemporaryDirectory() as folder:
        place = RunDirectory.create(Path(folder) / "run", "benchmark")
        plan = dataclasses.replace(plan, directory=str(place.path), batch=BATCH)
        result = execute(plan, chosen, objects, tell=lambda *_: None, watch=lambda _: None)
    assert result.samples_per_second is not None
    return result.samples_per_second


def sums() -> dict[str, float]:
    """Microseconds to add up vectors: in the order of ranks, and as whole numbers, which any order adds up alike."""
    vectors = [torch.randn(LENGTH, generator=torch.Generator().manual_seed(k)) for k in range(VECTORS)]
    weights, out = [1.0] * VECTORS, torch.empty(LENGTH)
    total, part, scaled = torch.empty(LENGTH, dtype=torch.int64), torch.empty(LENGTH, dtype=torch.int64), out.double()

    def in_order() -> None:
        mean_into(out, vectors, weights)

    def order_free() -> None:
        total.zero_()
        for vector in vectors:
            torch.mul(vector, 2.0**32, out=scaled)  # in doubles, or the scale would cost the last bits
            part.copy_(scaled)
            total.add_(part)
        torch.mul(total, 2.0**-32 / VECTORS, out=scaled)
        out.copy_(scaled)

    return {name: _least(one) for name, one in (("in the order of ranks", in_order), ("order-free", order_free))}


def _least(one: Callable[[], None]) -> float:
    """The least of many times, in microseconds: whatever else the machine does only adds to it."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        one()
        times.append(time.perf_counter() - began)
    return min(times) * 1e6


if __name__ == "__main__":
    main()
