"""The same settings in the simulator and in real processes: what accuracy each scheme reaches, and where bits agree.

python benchmarks/accuracy.py --seeds 3
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import warnings
from pathlib import Path

from rich.console import Console
from rich.table import Table

import paceline
from paceline.api.execute import execute
from paceline.config import build, discovery
from paceline.config.validate import planned
from paceline.result import Result
from paceline.runs.run_directory import RunDirectory
from paceline.task import Task


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--task", default="mnist-mlp")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--steps", type=int, default=600)
    options.add_argument("--seeds", type=int, default=3)
    given = options.parse_args()
    task = build.task_of(given.task, {})
    title = f"{given.task}, {given.workers} workers, {given.steps} updates, {given.seeds} seeds"
    table = Table(title=title, title_justify="left")
    for name in ("scheme", "simulator", "processes", "difference", "spread over seeds", "same bits"):
        table.add_column(name, justify="left" if name == "scheme" else "right")
    for name, cls in discovery.FAMILIES["schemes"]().items():
        workers = 1 if cls.value.alone else given.workers
        pairs = [both(task, name, workers, given.steps, seed) for seed in range(given.seeds)]
        virtual = [one.metrics["accuracy"] for one, _ in pairs]
        real = [two.metrics["accuracy"] for _, two in pairs]
        same = all(one.digest == two.digest for one, two in pairs)
        spread = max(max(virtual) - min(virtual), max(real) - min(real))
        means = statistics.mean(virtual), statistics.mean(real)
        cells = (f"{means[0]:.2%}", f"{means[1]:.2%}", f"{means[1] - means[0]:+.2%}", f"{spread:.2%}")
        table.add_row(name, *cells, "yes" if same else "")
    Console().print(table)


def both(task: Task, name: str, workers: int, steps: int, seed: int) -> tuple[Result, Result]:
    """One run in virtual time, one in processes."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        virtual = paceline.simulate(task, name, workers=workers, steps=steps, seed=seed, compute="exponential:1")
        plan, scheme, objects = planned(task, name, workers=workers, servers=1, steps=steps, seed=seed)
        place = RunDirectory.create(Path(folder) / "run", "benchmark")
        plan = dataclasses.replace(plan, directory=str(place.path))
        return virtual, execute(plan, scheme, objects, tell=lambda *_: None, watch=lambda _: None)


if __name__ == "__main__":
    main()
