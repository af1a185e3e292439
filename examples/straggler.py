"""Three ways to keep pace on real MNIST, four workers, one of them slow: what 97 % accuracy costs in virtual time."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import paceline
from paceline.datasets import load
from paceline.simulator.engine import SimulationEngine

TARGET = 0.97
SPEEDS = (1.0, 1.0, 1.0, 0.3)  # the last worker is a straggler
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "wait for all": ("sync", {"lr": 0.4}),
    "first 3 of 4": ("sync", {"lr": 0.4, "aggregate": 3}),
    "nobody waits": ("downpour", {"lr": 0.02, "window": 5}),
}


def main() -> None:
    console = Console()
    mnist = load("mnist", say=console.print)
    console.print(f"MNIST: {len(mnist.train[0]):,} + {len(mnist.test[0]):,} images ({mnist.source})")
    if mnist.notice:
        console.print(f"[bold yellow]notice:[/] {mnist.notice}")
    table = Table(title=f"mnist-mlp to {TARGET:.0%}: 4 workers, one of them at 0.3 of the speed")
    for column in ("scheme", "pace", "accuracy", "updates", "virtual time", "staleness"):
        table.add_column(column, justify="left" if column in ("scheme", "pace") else "right", no_wrap=True)
    bar = (TextColumn("{task.description:12}"), BarColumn(), TextColumn("{task.fields[now]}"), TimeElapsedColumn())
    with Progress(*bar, console=console) as progress:
        for pace, (scheme, hyper) in RUNS.items():
            line = progress.add_task(pace, total=3000, now="")

            def watch(engine: SimulationEngine, line: Any = line) -> None:
                now = f"update {engine.updates}  loss {engine.loss:.3f}"
                progress.update(line, completed=engine.updates, now=now)

            result = paceline.simulate(
                "mnist-mlp",
                scheme,
                workers=4,
                steps=3000,
                speeds=SPEEDS,
                compute="exponential:1.0",
                hooks=[f"target:value={TARGET},every=50"],
                watch=watch,
                **hyper,
            )
            progress.update(line, completed=3000)
            figures = (f"{result.metrics['accuracy']:.2%}", f"{result.updates:,}", f"{result.virtual_seconds:,.0f} s")
            table.add_row(scheme, pace, *figures, f"{result.staleness.mean:.2f}")
    console.print(table)
    console.print("Next: [bold].venv/bin/paceline list schemes[/], or write your own: docs/add-a-scheme.md")


if __name__ == "__main__":
    main()
