"""The command `paceline simulate`."""

from __future__ import annotations

import math
import time
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.api.simulate import simulate
from paceline.cli.commands import SimulateOptions
from paceline.cli.console import messages, say, screen, warn
from paceline.cli.options import print_json, use_data_directory
from paceline.cli.words import split
from paceline.config.simulation import Simulation
from paceline.errors import RunError
from paceline.report import tables
from paceline.simulator.engine import SimulationEngine


def simulate_command(asked: SimulateOptions, settings: dict[str, Any]) -> None:
    use_data_directory(asked.data)
    hyper, task_options = split(asked.words, simulate, Simulation)
    scheme = asked.scheme or "sync"
    try:
        with _Bar(settings.get("steps", Simulation.steps), scheme, asked.task) as bar:
            result = simulate(
                asked.task, scheme, task_options=task_options, warn=warn, watch=bar.watch, say=say, **settings, **hyper
            )
    except RunError as error:
        if asked.as_json and error.result is not None:  # what was reached is not lost
            print_json(error.result.as_dict() | {"error": str(error)})
        raise
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


class _Bar:
    """A live progress bar on a terminal's stderr; silent elsewhere."""

    def __init__(self, steps: int, scheme: str, task: str) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4g}  staleness {task.fields[staleness]:.2f}"),
            TimeRemainingColumn(),
            console=messages,
            transient=True,
            disable=not messages.is_terminal,
        )
        name = f"{scheme} on {task}"
        self._line = self._progress.add_task(escape(name), total=steps, loss=math.nan, staleness=0.0)
        self._shown = 0.0

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def watch(self, engine: SimulationEngine) -> None:
        now = time.monotonic()
        if now - self._shown > 0.1:
            self._shown = now
            staleness = engine.desk.ledger.mean() if engine.desk else 0.0
            self._progress.update(self._line, completed=engine.updates, loss=engine.loss, staleness=staleness)
