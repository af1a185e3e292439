"""The commands that compare: `paceline verify RUN`, `paceline diff RUN RUN`. Exit code 0 or 1, as of `diff`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from rich.console import RenderableType
from rich.text import Text

from paceline.cli.commands import DiffOptions, VerifyOptions
from paceline.cli.console import screen
from paceline.cli.options import print_json, use_data_directory
from paceline.report import comparison
from paceline.runs import diff as diffs
from paceline.runs import verify as verification


def verify(asked: VerifyOptions) -> None:
    use_data_directory(asked.data)
    found = verification.verify(asked.run)
    _show(found.as_dict(), comparison.verified(found), as_json=asked.as_json)
    raise typer.Exit(0 if found.verified else 1)


def diff(asked: DiffOptions) -> None:
    found = diffs.diff(asked.run, asked.other)
    _show(found.as_dict(), comparison.parted(found), as_json=asked.as_json)
    raise typer.Exit(0 if found.same else 1)


def _show(plain: dict[str, Any], parts: Sequence[RenderableType], *, as_json: bool) -> None:
    if as_json:
        print_json(plain)
        return
    for part in parts:
        screen.print(part, soft_wrap=isinstance(part, Text))
