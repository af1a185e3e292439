"""The table of run directories, a line each. Only JSON files are read."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.markup import escape
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
    """One run as plain data; unknown values are None. `damaged`: a sentence for each damaged file."""
    damage: list[str] = []
    plan, result = readable(run, damage, run.plan, {}), readable(run, damage, run.result) or {}
    history = readable(run, damage, lambda: run.history(damage.append), [])
    told = run.status() or {} if not result else {}
    metrics = result.get("metrics") or last_metrics(history)
    return {
        "run": run.name,
        "path": str(run.path),
        "task": result.get("task") or plan.get("task"),
        "scheme": result.get("scheme") or plan.get("scheme"),
        "workers": plan.get("processes") or plan.get("workers", result.get("workers")),
        "servers": plan.get("servers", result.get("servers")),
        "samples": result.get("samples", told.get("samples")),
        "epochs": result.get("epochs", told.get("epochs")),
        "updates": result.get("updates", told.get("updates", last(history, "update"))),
        "accuracy": metrics.get("accuracy"),
        "loss": metrics.get("loss"),
        "state": run.state,
        "started": run.started.isoformat(timespec="seconds"),
        "wall_seconds": result.get("wall_seconds", told.get("seconds", last(history, "seconds"))),
        "damaged": damage,
    }


class ListColumn(NamedTuple):
    """A column of the listing. On a narrow terminal the columns with the highest `rank` are omitted first."""

    heading: str
    rank: int
    justify: JustifyMethod
    cell: Callable[[Mapping[str, Any]], str | Text]


COLUMNS = (
    ListColumn("run", 0, "left", lambda one: Text(one["run"], "bold")),
    ListColumn("task", 7, "left", lambda one: number(one["task"])),
    ListColumn("scheme", 5, "left", lambda one: number(one["scheme"])),
    ListColumn("workers/servers", 10, "right", lambda one: f"{number(one['workers'])}/{number(one['servers'])}"),
    ListColumn("samples", 9, "right", lambda one: number(one["samples"])),
    ListColumn("epochs", 3, "right", lambda one: number(one["epochs"])),
    ListColumn("updates", 4, "right", lambda one: number(one["updates"])),
    ListColumn("reached", 2, "right", lambda one: _reached(one)),
    ListColumn("state", 1, "left", lambda one: Text(one["state"], STYLES[one["state"]])),
    ListColumn("when", 6, "left", lambda one: moment(datetime.fromisoformat(one["started"]))),
    ListColumn("seconds", 8, "right", lambda one: number(one["wall_seconds"])),
)


class Listing:
    """A table of runs, a line each. Columns that do not fit the terminal are omitted."""

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


def facts(title: str, rows: Iterable[Sequence[str | Text]], justify: JustifyMethod = "left") -> Table:
    """A table without headings: in each row a name, and what is known of it. No text is cut."""
    table = Table(title=escape(title), show_header=False, title_justify="left")
    table.add_column(style="bold")
    for row in rows:
        if len(table.columns) < len(row):
            table.add_column(justify=justify, overflow="fold")
        table.add_row(*map(_text, row))
    return table


def _text(cell: str | Text) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)


def readable(run: RunDirectory, damage: list[str], read: Callable[[], Any], otherwise: Any = None) -> Any:
    """The content of a file of a run, or `otherwise` if it is damaged: one damaged run must not hide the others.
    `damage` gets a sentence for each damaged file."""
    try:
        return read()
    except DataError as error:
        damage.append(str(error).replace(f"run {run.path}: ", ""))
        return otherwise


def last(history: Sequence[Mapping[str, Any]], key: str) -> Any:
    return next((line[key] for line in reversed(history) if line.get(key) is not None), None)


def last_metrics(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The metrics of the last evaluation; other lines are those of hooks."""
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
