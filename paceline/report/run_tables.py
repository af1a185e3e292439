"""Tables of run directories: all of them a line each, or one with all that is known of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from paceline.errors import DataError
from paceline.processes.supervisor import progress
from paceline.processes.supervisor.status import duration
from paceline.runs import checkpoint
from paceline.runs.run_directory import RunDirectory, RunState

STYLES = {
    RunState.RUNNING: "cyan",
    RunState.DONE: "green",
    RunState.INTERRUPTED: "magenta",
    RunState.FAILED: "red",
    RunState.BROKEN_OFF: "yellow",
    RunState.DAMAGED: "bold red",
}
LOG_LINES, LOG_BYTES = 10, 8192  # of the end of each log, when a run failed


def summary(run: RunDirectory) -> dict[str, Any]:
    """One run as plain data; what is not known is None. `damaged`: what is wrong with its files, a sentence each."""
    damage: list[str] = []
    plan, result, history = _plan(run, damage), _result(run, damage) or {}, _history(run, damage)
    told = progress.read(run) or {} if not result else {}
    metrics = result.get("metrics") or _last_metrics(history)
    return {
        "run": run.name,
        "path": str(run.path),
        "task": result.get("task") or plan.get("task"),
        "scheme": result.get("scheme") or plan.get("scheme"),
        "workers": plan.get("processes") or plan.get("workers", result.get("workers")),
        "servers": plan.get("servers", result.get("servers")),
        "updates": result.get("updates", told.get("updates", _last(history, "update"))),
        "accuracy": metrics.get("accuracy"),
        "loss": metrics.get("loss"),
        "state": run.state,
        "started": run.started.isoformat(timespec="seconds"),
        "wall_seconds": result.get("wall_seconds", told.get("seconds", _last(history, "seconds"))),
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
    ListColumn("task", 6, "left", lambda one: _number(one["task"])),
    ListColumn("scheme", 4, "left", lambda one: _number(one["scheme"])),
    ListColumn("workers/servers", 8, "right", lambda one: f"{_number(one['workers'])}/{_number(one['servers'])}"),
    ListColumn("updates", 3, "right", lambda one: _number(one["updates"])),
    ListColumn("reached", 2, "right", lambda one: _reached(one)),
    ListColumn("state", 1, "left", lambda one: Text(one["state"], STYLES[one["state"]])),
    ListColumn("when", 5, "left", lambda one: _when(datetime.fromisoformat(one["started"]))),
    ListColumn("seconds", 7, "right", lambda one: _number(one["wall_seconds"])),
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


def detail(run: RunDirectory) -> list[RenderableType]:
    """All that is known of one run."""
    state = run.state
    parts: list[RenderableType] = [
        Text.assemble((run.name, "bold"), " (run, ", (state, STYLES[state]), ")"),
        Text(str(run.path.resolve())),
    ]
    damage: list[str] = []
    parts.append(_pairs("plan", _plain_rows(_plan(run, damage))))
    result, history = _result(run, damage), _history(run, damage)
    if result is not None:
        parts.append(_pairs("result", _result_rows(result)))
    else:
        parts.append(_pairs("progress", _progress_rows(run, history)))
    kept = _checkpoints(run, damage)
    parts.append(kept if kept is not None else Text("no checkpoints"))
    best = checkpoint.best(run.path, damage.append)
    parts.extend(Text(text, "yellow") for text in damage)
    if best is not None:
        parts.append(Text(f"best: step {best.step:,}, {best.metric} {best.value:.6g} ({best.path})"))
    if state in (RunState.FAILED, RunState.BROKEN_OFF):
        parts.extend(_log_ends(run.logs))
    return parts


def _checkpoints(run: RunDirectory, damage: list[str]) -> Table | None:
    known = checkpoint.steps(run.checkpoints, damage.append)
    if not known:
        return None
    table = Table(title="checkpoints", title_justify="left")
    table.add_column("step", justify="right")
    table.add_column("size", justify="right")
    table.add_column("written")
    for step in known:
        path = checkpoint.find(run.checkpoints, step)
        if path is None:  # the run has deleted it meanwhile
            continue
        try:
            files = [file.stat() for file in path.iterdir()]
        except OSError:  # the same, a moment later
            continue
        written = datetime.fromtimestamp(max(file.st_mtime for file in files), UTC)
        table.add_row(f"{step:,}", _size(sum(file.st_size for file in files)), _when(written))
    return table


def _pairs(title: str, rows: Iterator[tuple[str, str]]) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(Text(name), Text(text))
    return table


def _plain_rows(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if value not in (None, "", [], {}):
            yield name, value if isinstance(value, str) else json.dumps(value)


def _result_rows(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if result.get("error"):
        yield "error", str(result["error"])
    if result.get("stopped"):
        yield "stopped", str(result["stopped"])
    yield from _metric_rows(result.get("metrics") or {})
    for key in ("updates", "gradients", "dropped", "samples", "restarts", "rolled_back_updates", "lost_updates"):
        if result.get(key) is not None:
            yield key.replace("_", " "), _number(result[key])
    for key, unit in (
        ("wall_seconds", " s"),
        ("time_to_first_step", " s"),
        ("samples_per_second", ""),
        ("peak_rss_mb", " MB"),
    ):
        if result.get(key) is not None:
            yield key.replace("_", " "), _number(result[key]) + unit
    stale = result.get("staleness")
    if isinstance(stale, dict):
        yield "staleness mean / max", f"{_number(stale.get('mean'))} / {_number(stale.get('max'))}"
    for key in ("digest", "fingerprint"):
        if result.get(key):
            yield key, f"{str(result[key])[:16]}…"


def _progress_rows(run: RunDirectory, history: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """How far a run is that has no result: as its launcher wrote last, else by its history."""
    told = progress.read(run)
    if told is not None:
        with suppress(KeyError, TypeError, ValueError, AttributeError):  # a damaged file tells nothing
            yield from list(_status_rows(told))
            return
    update, seconds = _last(history, "update"), _last(history, "seconds")
    yield "updates", _number(update) if update is not None else "none told yet"
    if seconds is not None:
        yield "seconds", _number(seconds)
    yield from _metric_rows(_last_metrics(history))


def _status_rows(told: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    age = told["age"]
    if age > progress.STALE:
        yield "last seen", f"{duration(age, '.0f')} ago"
    goal, updates = told["goal"], told["updates"]
    share = f" of {goal:,} ({100 * updates // goal}%)" if goal else ""
    yield "updates", _number(updates) + share
    rates = (("updates_per_second", "updates/s"), ("samples_per_second", "samples/s"))
    known = [f"{told[key]:,.4g} {unit}" for key, unit in rates if told.get(key) is not None]
    if known:
        yield "rate", ", ".join(known)
    if told.get("seconds") is not None:
        left = told.get("seconds_left")
        ends = f", about {duration(max(left - age, 0.0), '.0f')} left" if left is not None else ""
        yield "running for", duration(told["seconds"] + age, ".0f") + ends
    if told.get("checkpoint_age") is not None:
        old = duration(told["checkpoint_age"] + age, ".0f")
        yield "newest checkpoint", f"update {told['checkpoint']:,}, {old} old"
    for one in told.get("roles", ()):
        step = f", step {one['step']:,}" if one["step"] >= 0 else ""
        again = f", {one['restarts']} restarts" if one["restarts"] else ""
        yield str(one["name"]), f"{one['state']}{step}{again}"
    yield from _metric_rows(told.get("metrics") or {})


def _metric_rows(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in metrics.items():
        share = name == "accuracy" and isinstance(value, int | float)
        yield name, f"{value:.2%}" if share else _number(value)


def _log_ends(logs: Path) -> Iterator[RenderableType]:
    found = sorted(path for path in logs.rglob("*") if path.is_file()) if logs.is_dir() else []
    for path in found:
        lines = _end(path)
        if lines:
            yield Text(f"end of {path}", style="bold")
            yield Text("\n".join(lines))


def _end(path: Path) -> list[str]:
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - LOG_BYTES))
            text = stream.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-LOG_LINES:]


def _plan(run: RunDirectory, damage: list[str]) -> dict[str, Any]:
    try:
        return run.plan()
    except DataError as error:  # one broken run must not hide the others
        damage.append(_within(error, run))
        return {}


def _result(run: RunDirectory, damage: list[str]) -> dict[str, Any] | None:
    try:
        return run.result()
    except DataError as error:
        damage.append(_within(error, run))
        return None


def _history(run: RunDirectory, damage: list[str]) -> list[dict[str, Any]]:
    try:
        return run.history(damage.append)
    except DataError as error:
        damage.append(_within(error, run))
        return []


def _within(error: Exception, run: RunDirectory) -> str:
    return str(error).replace(f"run {run.path}: ", "")


def _last(history: Sequence[Mapping[str, Any]], key: str) -> Any:
    return next((line[key] for line in reversed(history) if line.get(key) is not None), None)


def _last_metrics(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the last evaluation; other lines hold what hooks noted."""
    for line in reversed(history):
        if "loss" in line:
            return {name: value for name, value in line.items() if name not in ("update", "seconds")}
    return {}


def _reached(one: Mapping[str, Any]) -> str:
    if isinstance(one["accuracy"], int | float):
        return f"{one['accuracy']:.2%}"
    return f"loss {_number(one['loss'])}" if one["loss"] is not None else "-"


def _number(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.5g}"
    return "-" if value is None else str(value)


def _when(moment: datetime) -> str:
    return f"{moment.astimezone():%Y-%m-%d %H:%M}"


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
