"""The commands that compare: `paceline verify RUN`, `paceline diff RUN RUN`. Exit code 0 or 1, as of `diff`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from paceline.report import comparison
from paceline.runs import diff as diffs
from paceline.runs import verify as verification
from paceline.runs.atomic_files import finite

screen = Console(highlight=False)

Run = Annotated[str, typer.Argument(help="A run directory, or its name under runs/.")]
Other = Annotated[str, typer.Argument(metavar="RUN", help="The one to compare it with.")]
DataDirectory = Annotated[str | None, typer.Option("--data", help="A directory with data sets (or set PACELINE_DATA).")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of the table.")]


def verify(run: Run, data: DataDirectory = None, as_json: AsJson = False) -> None:
    """Read a run again: do its checkpoints, its digest, its settings and its data fit together? Exit code 1 if not."""
    if data is not None:
        os.environ["PACELINE_DATA"] = data
    found = verification.verify(run)
    _show(found.as_dict(), comparison.verified(found), as_json=as_json)
    raise typer.Exit(0 if found.verified else 1)


def diff(run: Run, other: Other, as_json: AsJson = False) -> None:
    """Have two runs come to the same bits, and if not, where do they part? Exit code 1 if not."""
    found = diffs.diff(run, other)
    _show(found.as_dict(), comparison.parted(found), as_json=as_json)
    raise typer.Exit(0 if found.same else 1)


def _show(plain: dict[str, Any], parts: Sequence[RenderableType], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(finite(plain), allow_nan=False) + "\n")
        return
    for part in parts:
        screen.print(part, soft_wrap=isinstance(part, Text))
