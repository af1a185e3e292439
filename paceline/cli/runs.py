"""The command `paceline runs`. It reads JSON files only, and loads neither torch nor numpy."""

from pathlib import Path

from paceline.cli.commands import RunsOptions
from paceline.cli.console import say, screen
from paceline.cli.options import print_json
from paceline.errors import UsageError
from paceline.report.run_tables import Listing, summary
from paceline.runs.run_directory import RUNS, runs_in


def runs(asked: RunsOptions) -> None:
    if asked.root != RUNS and not asked.root.is_dir():
        raise UsageError(f"no folder {asked.root} (looked in {Path.cwd()})")
    found = runs_in(asked.root)
    if asked.as_json:
        for run in found:
            print_json(summary(run))
    elif found:
        screen.print(Listing(found))
    else:
        say(f"no runs in {asked.root.resolve()}; `paceline train` makes them")
