"""The table of run directories, a line each. It reads JSON files only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.table import Table
from rich.text import Text

from paceline.errors import DataError
from paceline.runs.run_directory import RunDirectory, RunState

STYLES = {
    RunState.RUNNING: "cyan",
    RunState.DONE: "green",
    RunState.INTERRUPTED: "magenta",
    RunState.FAILED: "red",
    RunState.BROKEN_OFF: "yellow",
    RunState.DAMAGED: "bold red",
}


def summary(run: RunDirectory) -> dict[str, Any]:
    """One run as plain data; what is not known is None. `damaged`: what is wrong with its files, a sentence each."""
    damage: list[str] = []
    plan, result, history = plan_of(run, damage), result_of(run, damage) or {}, history_of(run, damage)
    told = run.status() or {} if not result else {}
    metrics = result.get("metrics") or last_metrics(history)
    return {
        "run": run.name,
        "path": str(run.path),
        "task": result.get("task") or plan.get("task"),
        "scheme": result.get("scheme") or plan.get("scheme"),
        "workers": plan.get("processes") or plan.get("workers", result.get("workers")),
        "servers": plan.get("servers", result.get("servers")),
        "updates": result.get("updates", told.get("updates", last(history, "update"))),
        "accuracy": metrics.get("accuracy"),
        "loss": metrics.get("loss"),
        "state": run.state,
        "started": run.started.isoformat(timespec="seconds"),
        "wall_seconds": result.get("wall_seconds", told.get("seconds", last(history, "seconds"))),
        "damaged": damage,
    }


class ListColumn(NamedTuple):
    """One of the listing: the lowest `rank` stays longest when the terminal is narrow."""

    heading: str
    rank: int
    justify: JustifyMethod
    cell: Callable[[Mapping[str, Any]], str | Text]


COLUMNS = (
    ListColumn("run", 0, "left", lambda one: Text(one["run"], "bold")),
    ListColumn("task", 6, "left", lambda one: number(one["task"])),
    ListColumn("scheme", 4, "left", lambda one: number(one["scheme"])),
    ListColumn("workers/servers", 8, "right", lambda one: f"{number(one['workers'])}/{number(one['servers'])}"),
    ListColumn("updates", 3, "right", lambda one: number(one["updates"])),
    ListColumn("reached", 2, "right", lambda one: _reached(one)),
    ListColumn("state", 1, "left", lambda one: Text(one["state"], STYLES[one["state"]])),
    ListColumn("when", 5, "left", lambda one: moment(datetime.fromisoformat(one["started"]))),
    ListColumn("seconds", 7, "right", lambda one: number(one["wall_seconds"])),
)


class Listing:
    """Runs, a line each. Columns that have no room are left out: one cut to two letters would say nothing."""

    def __init__(self, runs: Sequence[RunDirectory]) -> None:
        known = [summary(run) for run in runs]
        self._rows = [[_text(column.cell(one)) for column in COLUMNS] for one in known]
        self._damage = [f"{one['run']}: {text}" for one in known for text in one["damaged"]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(title="runs", title_justify="left", box=None, padding=(0, 2, 0, 0))
        fitting = self._fitting(options.max_width)
        for index in fitting:
            table.add_column(COLUMNS[index].heading, justify=COLUMNS[index].justify, overflow="fold")
        for row in self._rows:
            table.add_row(*(row[index] for index in fitting))
        yield table
        for text in self._damage:
            yield Text(text, "yellow")

    def _fitting(self, width: int) -> list[int]:
        wanted = [
            max(len(column.heading), *(row[index].cell_len for row in self._rows), 0) + 2
            for index, column in enumerate(COLUMNS)
        ]
        kept: list[int] = []
        for index in sorted(range(len(COLUMNS)), key=lambda index: COLUMNS[index].rank):
            if kept and sum(wanted[other] for other in kept) + wanted[index] > width:
                break
            kept.append(index)
        return sorted(kept)


def listing(runs: Sequence[RunDirectory]) -> Listing:
    """Runs, a line each."""
    return Listing(runs)


def _text(cell: str | Text) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)


def plan_of(run: RunDirectory, damage: list[str]) -> dict[str, Any]:
    """The plan of a run; a file that cannot be read adds a sentence to `damage`."""
    try:
        return run.plan()
    except DataError as error:  # one broken run must not hide the others
        damage.append(_within(error, run))
        return {}


def result_of(run: RunDirectory, damage: list[str]) -> dict[str, Any] | None:
    """The result of a run, None while it has none."""
    try:
        return run.result()
    except DataError as error:
        damage.append(_within(error, run))
        return None


def history_of(run: RunDirectory, damage: list[str]) -> list[dict[str, Any]]:
    """The evaluations of a run so far."""
    try:
        return run.history(damage.append)
    except DataError as error:
        damage.append(_within(error, run))
        return []


def _within(error: Exception, run: RunDirectory) -> str:
    return str(error).replace(f"run {run.path}: ", "")


def last(history: Sequence[Mapping[str, Any]], key: str) -> Any:
    return next((line[key] for line in reversed(history) if line.get(key) is not None), None)


def last_metrics(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the last evaluation; other lines hold what hooks noted."""
    for line in reversed(history):
        if "loss" in line:
            return {name: value for name, value in line.items() if name not in ("update", "seconds")}
    return {}


def _reached(one: Mapping[str, Any]) -> str:
    if isinstance(one["accuracy"], int | float):
        return f"{one['accuracy']:.2%}"
    return f"loss {number(one['loss'])}" if one["loss"] is not None else "-"


def number(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.5g}"
    return "-" if value is None else str(value)


def moment(when: datetime) -> str:
    return f"{when.astimezone():%Y-%m-%d %H:%M}"
