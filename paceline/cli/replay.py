"""The commands on a run's record: `paceline replay | samples`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors.torch import save_file

from paceline.config import build
from paceline.errors import UsageError
from paceline.runs.atomic_files import finite
from paceline.runs.replay.replay import Replayed, replay
from paceline.runs.replay.sample_usage import samples
from paceline.runs.run_directory import RunDirectory

screen, messages = Console(highlight=False), Console(stderr=True, highlight=False)

Run = Annotated[str, typer.Argument(help="A run directory, or its name under runs/.")]
DataDirectory = Annotated[str | None, typer.Option("--data", help="A directory with data sets (or set PACELINE_DATA).")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def replay_command(
    run: Run,
    until: Annotated[int | None, typer.Option(help="Stop at this update and give its state.")] = None,
    what_if: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE of the server, instead of what the run had; may be repeated.")
    ] = None,
    since: Annotated[int, typer.Option(help="The update from which --what-if holds.")] = 0,
    save: Annotated[Path | None, typer.Option(help="Write the vector that it ends with to this file.")] = None,
    data: DataDirectory = None,
    as_json: AsJson = False,
) -> None:
    """Repeat a recorded run in one process, call by call, and compare every bit that was noted."""
    if data is not None:
        os.environ["PACELINE_DATA"] = data
    if since and not what_if:
        raise UsageError("--since says from when --what-if holds; give --what-if KEY=VALUE too")
    if save is not None and save.exists():
        raise UsageError(f"{save} exists; name another file")
    changed = build.pairs(what_if) if what_if else None
    goal = until or (RunDirectory.open(run).result() or {}).get("updates")
    columns = (TextColumn("repeating"), BarColumn(), MofNCompleteColumn(), TextColumn("updates"), TimeRemainingColumn())
    with Progress(*columns, console=messages, transient=True) as progress:
        bar = progress.add_task("", total=goal)
        told = replay(run, until=until, what_if=changed, since=since, watch=lambda v: progress.update(bar, completed=v))
    if save is not None:
        save_file({"model": told.vector}, save)
    if as_json:
        sys.stdout.write(json.dumps(finite(told.as_dict())) + "\n")
    else:
        then = (RunDirectory.open(run).result() or {}).get("metrics", {}) if changed else {}
        _show(run, told, then, asked=until is not None or changed is not None)
    if not told.match:
        raise typer.Exit(1)


def _show(run: str, told: Replayed, then: Mapping[str, float], *, asked: bool) -> None:
    """`then`: what the run itself came to, where something else was tried."""
    screen.print(f"{escape(run)}: {told.updates:,} updates and {told.gradients:,} gradients repeated", soft_wrap=True)
    if not then:
        steps = ", ".join(f"{step:,}" for step in told.checkpoints) or "none to compare"
        screen.print(f"checkpoints with the same bits: {steps}", soft_wrap=True)
    if told.cut:
        screen.print("the log has no end: it was repeated as far as it goes", style="yellow")
    screen.print(f"digest {told.digest}")
    if told.recorded_updates is not None and told.recorded_updates != told.updates:
        screen.print(f"the run has saved update {told.recorded_updates:,}, digest {told.recorded_digest}")
    for name, value in told.metrics.items():
        before = f" (in the run itself {then[name]:.6g})" if name in then else ""
        screen.print(f"{name} {value:.6g}{before}")
    if told.difference is not None:
        parted = told.difference
        where = f"differs at update {parted.update:,}, {parted.where}: {escape(parted.text)}"
        screen.print(where, style="red", soft_wrap=True)
        for hint in told.hints:
            screen.print(f"  {escape(hint)}")
    elif not asked:
        screen.print("match", style="green")


def samples_command(
    run: Run,
    sample: Annotated[int | None, typer.Option(help="Every use of this sample, instead of the sums.")] = None,
    data: DataDirectory = None,
    as_json: AsJson = False,
) -> None:
    """Which samples a recorded run has used, how often, and what became of the rest."""
    if data is not None:
        os.environ["PACELINE_DATA"] = data
    ledger = samples(run)
    if sample is not None:
        uses = ledger.of(sample)
        if as_json:
            sys.stdout.write(json.dumps([use._asdict() for use in uses]) + "\n")
            return
        table = Table("worker", "its mini-batch", "fate", "update", title=f"sample {sample}", title_justify="left")
        for use in uses:
            table.add_row(str(use.rank), str(use.batch), use.fate, "" if use.update is None else f"{use.update:,}")
        screen.print(table)
        return
    fates, epochs = ledger.fates(), ledger.epochs()
    if as_json:
        sys.stdout.write(json.dumps({"samples": ledger.n, "gradients": fates, "epochs": epochs}) + "\n")
        return
    screen.print("gradients: " + ", ".join(f"{number:,} {fate}" for fate, number in fates.items()))
    table = Table(*(epochs[0] if epochs else ()), title=f"uses of {ledger.n:,} samples", title_justify="left")
    for row in epochs:
        table.add_row(*(f"{value:,}" for value in row.values()))
    screen.print(table)
