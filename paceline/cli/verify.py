"""The commands that compare: `paceline verify RUN`, `paceline diff RUN RUN`. Exit code 0 or 1, as of `diff`."""

import typer

from paceline.cli.commands import DiffOptions, VerifyOptions
from paceline.cli.console import show
from paceline.cli.options import print_json
from paceline.report import comparison
from paceline.runs.diff import Difference
from paceline.runs.diff import diff as diff_runs
from paceline.runs.verify import Verification
from paceline.runs.verify import verify as verify_run


def verify(asked: VerifyOptions) -> None:
    found = verify_run(asked.run)
    _end(asked, found, good=found.verified)


def diff(asked: DiffOptions) -> None:
    found = diff_runs(asked.run, asked.other)
    _end(asked, found, good=found.same)


def _end(asked: VerifyOptions | DiffOptions, found: Verification | Difference, *, good: bool) -> None:
    if asked.as_json:
        print_json(found.as_dict())
    else:
        show(comparison.verified(found) if isinstance(found, Verification) else comparison.parted(found))
    raise typer.Exit(0 if good else 1)
