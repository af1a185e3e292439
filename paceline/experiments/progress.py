"""The progress of a comparison: bars on a terminal, a line for each finished run elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from paceline.experiments.cells import DONE, CellOutcome, RunCell
from paceline.signals import Interrupted


class CellProgress:
    """How many cells of how many are done, and which are under way."""

    def __init__(self, whole: int, say: Callable[[str], None], bar: Progress | None) -> None:
        self.whole, self.done, self.found = whole, 0, 0
        self._say, self._bar = say, bar
        self._lines: dict[str, TaskID] = {}
        self._total = None if bar is None else bar.add_task("all runs", total=whole)

    def skip(self, number: int) -> None:
        """Cells that an earlier call has performed."""
        self.done += number
        self.found += number
        self._draw()

    def finished(self, cell: RunCell, outcome: CellOutcome) -> None:
        self.done += 1
        if self._bar is None:
            values = "  ".join(f"{name} {value:.4g}" for name, value in outcome.final.items())
            told = values if outcome.status == DONE else f"{outcome.status}: {outcome.reason.partition(';')[0]}"
            self._say(f"{self.done:>3}/{self.whole}  {cell.title}  {told}")
        elif outcome.status != DONE:
            self._bar.console.print(f"{escape(cell.title)}: {outcome.status}", style="yellow")
        self._draw()

    def watch(self, running: list[tuple[RunCell, float]]) -> None:
        if self._bar is None:
            return
        for key in self._lines.keys() - {cell.key for cell, _ in running}:
            self._bar.remove_task(self._lines.pop(key))
        for cell, share in running:
            if cell.key not in self._lines:
                self._lines[cell.key] = self._bar.add_task(escape(cell.title), total=1.0)
            self._bar.update(self._lines[cell.key], completed=share)
        share = sum(share for _, share in running)
        assert self._total is not None
        self._bar.update(self._total, completed=self.done + share)

    def _draw(self) -> None:
        if self._bar is not None and self._total is not None:
            self._bar.update(self._total, completed=self.done, description=f"{self.done} of {self.whole} runs")


@contextmanager
def shown_progress(whole: int, directory: str, say: Callable[[str], None] | None) -> Iterator[CellProgress]:
    """Show progress on stderr. An interruption says how to go on."""
    console = Console(stderr=True, highlight=False)
    tell = say or (lambda text: print(text, file=sys.stderr))
    progress: CellProgress | None = None
    try:
        if say is None and console.is_terminal:
            columns = (
                TextColumn("{task.description}", table_column=Column(no_wrap=True, max_width=36)),
                BarColumn(None, table_column=Column(ratio=1)),
                TimeElapsedColumn(),
                TimeRemainingColumn(compact=True),
            )
            with Progress(*columns, console=console, transient=True, expand=True) as bar:
                progress = CellProgress(whole, tell, bar)
                yield progress
        else:
            progress = CellProgress(whole, tell, None)
            yield progress
    except (KeyboardInterrupt, Interrupted):
        done = 0 if progress is None else progress.done
        tell(f"interrupted: {done} of {whole} runs are kept in {directory}; the same command goes on from there")
        raise
