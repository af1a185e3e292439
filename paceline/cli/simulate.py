"""The command `paceline simulate`."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.api.simulate import simulate
from paceline.cli.commands import SimulateOptions
from paceline.cli.console import messages, say, screen, warn
from paceline.cli.options import print_json
from paceline.config import build
from paceline.config.simulation import Simulation
from paceline.report import tables
from paceline.result import epochs_of
from paceline.simulator.engine import SimulationEngine


def simulate_command(asked: SimulateOptions, settings: dict[str, Any]) -> None:
    hyper, task_options = build.split(asked.words, simulate, Simulation)
    scheme = asked.scheme or "sync"
    settings |= {"task_options": task_options, "warn": warn, "say": say}
    with _bar(scheme, asked.task) as watch:
        result = simulate(asked.task, scheme, watch=watch, **settings, **hyper)
    if result.notice:
        warn(result.notice, "notice")
    if result.stopped:
        messages.print(f"stopped: {escape(result.stopped)}")
    if asked.as_json:
        print_json(result.as_dict())
        return
    for point in result.history:
        shown = "  ".join(f"{name} {value:.4g}" for name, value in point.metrics.items())
        screen.print(f"update {point.update:>7,}  {point.seconds:>10,.5g} s  {shown}")
    screen.print(tables.closing(result))


@contextmanager
def _bar(scheme: str, task: str) -> Iterator[Callable[[SimulationEngine], None]]:
    """A live progress bar on a terminal's stderr; silent elsewhere. Yields the function that updates it."""
    values = TextColumn("{task.fields[work]}  loss {task.fields[loss]:.4g}  staleness {task.fields[staleness]:.2f}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), values, TimeRemainingColumn())
    shown = 0.0
    with Progress(*columns, console=messages, transient=True, disable=not messages.is_terminal) as progress:
        line = progress.add_task(escape(f"{scheme} on {task}"), total=None, work="", loss=math.nan, staleness=0.0)

        def watch(engine: SimulationEngine) -> None:
            nonlocal shown
            if time.monotonic() - shown > 0.1:
                shown = time.monotonic()
                staleness = engine.scheduler.ledger.mean() if engine.scheduler else 0.0
                epochs = epochs_of(engine.samples, engine.task.epoch_size)
                work = f"{engine.samples:,} samples" if epochs is None else f"epoch {epochs:,.2f}"
                told: dict[str, Any] = {"work": work, "loss": engine.loss, "staleness": staleness}
                progress.update(line, completed=engine.updates, total=engine.goal, **told)

        yield watch
