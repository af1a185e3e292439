"""The commands on a recorded run: `paceline replay`, `paceline samples`."""

from collections.abc import Mapping

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors.torch import save_file

from paceline.cli.commands import ReplayOptions, SamplesOptions
from paceline.cli.console import messages, screen
from paceline.cli.options import print_json
from paceline.config import build
from paceline.errors import UsageError
from paceline.runs.replay.replay import Replayed, replay
from paceline.runs.replay.sample_usage import samples
from paceline.runs.run_directory import RunDirectory


def replay_command(asked: ReplayOptions) -> None:
    run, until, since, save = asked.run, asked.until, asked.since, asked.save
    if since and not asked.what_if:
        raise UsageError("--since says from when --what-if holds; give --what-if KEY=VALUE too")
    if save is not None and save.exists():
        raise UsageError(f"{save} exists; name another file")
    changed = build.pairs(asked.what_if) if asked.what_if else None
    goal = until or (RunDirectory.open(run).result() or {}).get("updates")
    columns = (TextColumn("repeating"), BarColumn(), MofNCompleteColumn(), TextColumn("updates"), TimeRemainingColumn())
    with Progress(*columns, console=messages, transient=True) as progress:
        bar = progress.add_task("", total=goal)
        told = replay(run, until=until, what_if=changed, since=since, watch=lambda v: progress.update(bar, completed=v))
    if save is not None:
        save_file({"model": told.vector}, save)
    if asked.as_json:
        print_json(told.as_dict())
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


def samples_command(asked: SamplesOptions) -> None:
    ledger = samples(asked.run)
    if asked.sample is not None:
        uses = ledger.of(asked.sample)
        if asked.as_json:
            print_json([use._asdict() for use in uses])
            return
        table = Table(
            "worker", "its mini-batch", "fate", "update", title=f"sample {asked.sample}", title_justify="left"
        )
        for use in uses:
            table.add_row(str(use.rank), str(use.batch), use.fate, "" if use.update is None else f"{use.update:,}")
        screen.print(table)
        return
    fates, epochs = ledger.fates(), ledger.epochs()
    if asked.as_json:
        print_json({"samples": ledger.n, "gradients": fates, "epochs": epochs})
        return
    screen.print("gradients: " + ", ".join(f"{number:,} {fate}" for fate, number in fates.items()))
    table = Table(*(epochs[0] if epochs else ()), title=f"uses of {ledger.n:,} samples", title_justify="left")
    for row in epochs:
        table.add_row(*(f"{value:,}" for value in row.values()))
    screen.print(table)
