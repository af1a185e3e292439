"""Three ways to keep pace on real MNIST with four workers, one of them slow: what each costs in (virtual) time.

Run by `make demo`.
"""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import paceline
from paceline.data import load
from paceline.sim.engine import Engine

SPEEDS = (1.0, 1.0, 1.0, 0.3)  # the last worker is a straggler
RUNS = {
    "waits for all": ("sync", {"lr": 0.4, "steps": 1500}),
    "first 3 of 4": ("sync", {"lr": 0.4, "aggregate": 3, "steps": 1500}),
    "nobody waits": ("downpour", {"lr": 0.02, "window": 5, "steps": 1500}),
}


def main() -> None:
    console = Console()
    mnist = load("mnist", say=console.print)
    console.print(f"MNIST: {len(mnist.train[0]):,} + {len(mnist.test[0]):,} images ({mnist.source})")
    if mnist.notice:
        console.print(f"[bold yellow]notice:[/] {mnist.notice}")
    table = Table(title="mnist-mlp, 4 workers, worker 3 at 0.3 of the speed")
    for column in ("scheme", "pace", "accuracy", "updates", "virtual time", "staleness", "dropped"):
        table.add_column(column, justify="left" if column in ("scheme", "pace") else "right")
    shown = (
        TextColumn("{task.description:24}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
    )
    with Progress(*shown, console=console) as progress:
        for name, (scheme, options) in RUNS.items():
            line = progress.add_task(name, total=options["steps"], loss=float("nan"))

            def watch(engine: Engine, line: int = line) -> None:
                progress.update(line, completed=engine.updates, loss=engine.loss)

            result = paceline.simulate(
                "mnist-mlp", scheme, workers=4, speeds=SPEEDS, compute="exponential:1.0", watch=watch, **options
            )
            row = (scheme, name, f"{result.metrics['accuracy']:.2%}", f"{result.updates}")
            stale = f"{result.staleness.mean:.2f}"
            table.add_row(*row, f"{result.virtual_seconds:,.0f} s", stale, f"{result.dropped}")
    console.print(table)
    console.print("Next: [bold].venv/bin/paceline list schemes[/], or write your own: docs/add-a-scheme.md")


if __name__ == "__main__":
    main()
