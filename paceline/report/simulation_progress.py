"""The progress of a simulation: a bar on a terminal or in a notebook, nothing elsewhere. It starts no thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from paceline.report.notebook import Output
from paceline.result import epochs_of
from paceline.simulator.engine import SimulationEngine

EVERY = 0.1  # seconds between two drawings


@contextmanager
def progress(console: Console, title: str) -> Iterator[Callable[[SimulationEngine], None] | None]:
    """Yields the function that updates the bar, to be called after every update; None where there is no bar."""
    if not (console.is_terminal or console.is_jupyter):
        yield None
        return
    columns = (
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(None, table_column=Column(ratio=1)),  # it takes the room that the texts leave
        *(TextColumn(f"{{task.fields[{name}]}}", table_column=Column(no_wrap=True)) for name in ("share", "values")),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
    )
    bar = Progress(*columns, console=console, transient=True, auto_refresh=False, expand=True)
    line = bar.add_task(escape(title), total=None, share="", values="")
    output = Output() if console.is_jupyter else None
    drawn = 0.0

    def watch(engine: SimulationEngine) -> None:
        nonlocal drawn
        if time.monotonic() - drawn < EVERY:
            return
        drawn = time.monotonic()
        epochs = epochs_of(engine.samples, engine.task.epoch_size)
        staleness = engine.scheduler.ledger.mean() if engine.scheduler else 0.0
        work = f"{engine.samples:,} samples" if epochs is None else f"epoch {epochs:,.2f}"
        values = [work, f"loss {engine.loss:.4g}"]
        values += [f"staleness {staleness:.2f}"] if staleness else []
        share = f"{100 * engine.updates // max(engine.goal, 1)}%" if engine.goal is not None else f"{engine.updates:,}"
        bar.update(line, completed=engine.updates, total=engine.goal, share=share, values="  ".join(values))
        if output is not None:
            output.show(bar.get_renderable())
        else:
            bar.refresh()

    watch.every = 0  # type: ignore[attr-defined]  # it need not be called after each update
    if output is not None:
        try:
            yield watch
        finally:
            output.clear()
        return
    with bar:
        yield watch
