"""The display of a run in a notebook: one output of the cell, which is replaced in place. It needs IPython only."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from rich.console import Console, RenderableType

from paceline.processes.supervisor.status import Status, UpdateRate, time_left
from paceline.report.live import frame

WIDTH, HEIGHT = 100, 60  # characters
EVERY = 0.25  # seconds between two drawings
_PAGE = "<pre style='line-height:1.2;font-family:Menlo,DejaVu Sans Mono,Consolas,monospace'>{code}</pre>"


class Output:
    """A place in the output of a cell."""

    def __init__(self) -> None:
        self._ipython: Any = import_module("IPython.display")
        self._handle: Any = None

    def show(self, content: RenderableType) -> None:
        """Replace what is there."""
        canvas = Console(
            file=io.StringIO(), width=WIDTH, height=HEIGHT, record=True, force_terminal=True, force_jupyter=False
        )
        canvas.print(content)
        html = self._ipython.HTML(canvas.export_html(inline_styles=True, code_format=_PAGE))
        if self._handle is None:
            self._handle = self._ipython.display(html, display_id=True)
        else:
            self._handle.update(html)

    def clear(self) -> None:
        if self._handle is not None:
            self._handle.update(self._ipython.HTML(""))


class NotebookDisplay:
    """Shows a run while it is entered, as `live.Display` does on a terminal. The last table stays."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._output, self._clock, self._pace = Output(), clock, UpdateRate()
        self._status: Status | None = None
        self._drawn = -EVERY

    def __enter__(self) -> NotebookDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._draw(self._status)

    def update(self, status: Status) -> None:
        """Draw the new status, unless the last one has just been drawn."""
        self._status = status
        self._pace.note(self._clock(), status.updates)
        if self._clock() - self._drawn >= EVERY:
            self._draw(status)

    def tell(self, kind: str, text: str) -> None:
        """Print a message of the launcher, by its kind."""
        if kind in ("say", "out", "err"):
            print(text, file=sys.stderr if kind == "err" else sys.stdout)
        elif kind != "bar":
            print(f"warning: {text}", file=sys.stderr)

    def _draw(self, status: Status) -> None:
        self._drawn = self._clock()
        self._output.show(frame(status, time_left(status, self._pace, self._drawn), "", WIDTH, HEIGHT))
