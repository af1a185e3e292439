"""The commands `paceline show` and `paceline data`."""

from pathlib import Path

from rich.markup import escape

from paceline import datasets
from paceline.cli import console
from paceline.cli.commands import DataOptions, ShowOptions
from paceline.cli.console import say, screen
from paceline.config import discovery
from paceline.errors import DataError, UsageError
from paceline.report import tables
from paceline.report.run_detail import detail
from paceline.runs.run_directory import RunDirectory


def show(asked: ShowOptions) -> None:
    if show_run(asked.name):
        return
    family, found = discovery.anything(asked.name)
    screen.print(f"[bold]{escape(found.name)}[/bold] ({family})")
    for paragraph in found.doc.split("\n\n"):
        # a listing keeps its lines, prose follows the width of the terminal
        screen.print(escape(paragraph if "  " in paragraph else paragraph.replace("\n", " ")) + "\n")
    if family == "schemes":
        _show_catalogue(found)
    table = tables.parameters(family, found)
    if table is not None:
        screen.print(table)
    screen.print(f"file: {escape(found.file)}")


def _show_catalogue(found: discovery.Member) -> None:
    scheme = found.value
    facts = {"family": scheme.family, "good for": scheme.good_for, "vectors per gradient": scheme.volume}
    facts |= {"stable for": scheme.limit, "identities": scheme.equals}
    for what, text in facts.items():
        if text:
            screen.print(f"{what}: {escape(text)}")


def show_run(name: str | Path) -> bool:
    """Print one run in detail; False if there is no run of that name."""
    try:
        run = RunDirectory.open(name)
    except UsageError:
        return False
    console.show(detail(run))
    return True


def data(asked: DataOptions) -> None:
    found = datasets.load(asked.name, asked.directory, say=say)
    if found.notice:
        raise DataError(found.notice)  # a run may use a substitute, but this command was asked for the real data
    screen.print(f"{found.name}: {len(found.train[0]):,} to train, {len(found.test[0]):,} to test")
    screen.print(f"source: {escape(found.source)}")
    screen.print(f"directory: {escape(str(found.path or 'an installed package'))}", soft_wrap=True)
