"""Tables of run directories: all of them a line each, or one with all that is known of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from paceline import checkpoint
from paceline.directory import RunDirectory
from paceline.errors import DataError

STYLES = {"running": "cyan", "done": "green", "failed": "red", "broken off": "yellow"}
LOG_LINES, LOG_BYTES = 10, 8192  # of the end of each log, when a run failed


def summary(run: RunDirectory) -> dict[str, Any]:
    """One run as plain data; what is not known is None."""
    plan, result, history = _plan(run), _result(run) or {}, _history(run)
    metrics = result.get("metrics") or _last_metrics(history)
    return {
        "run": run.name,
        "path": str(run.path),
        "task": result.get("task") or plan.get("task"),
        "scheme": result.get("scheme") or plan.get("scheme"),
        "workers": plan.get("workers", result.get("workers")),
        "servers": plan.get("servers", result.get("servers")),
        "updates": result.get("updates", _last(history, "update")),
        "accuracy": metrics.get("accuracy"),
        "loss": metrics.get("loss"),
        "state": run.state,
        "started": run.started.isoformat(timespec="seconds"),
        "wall_seconds": result.get("wall_seconds", _last(history, "seconds")),
    }


def listing(runs: Sequence[RunDirectory]) -> Table:
    """Runs, a line each."""
    table = Table(title="runs", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("run", style="bold", no_wrap=True)
    for column in ("task", "scheme"):
        table.add_column(column)
    for column in ("workers/servers", "updates", "reached"):
        table.add_column(column, justify="right")
    for column in ("state", "when"):
        table.add_column(column, no_wrap=True)
    table.add_column("seconds", justify="right")
    for run in runs:
        one = summary(run)
        table.add_row(
            Text(one["run"]),
            Text(_number(one["task"])),
            Text(_number(one["scheme"])),
            f"{_number(one['workers'])}/{_number(one['servers'])}",
            _number(one["updates"]),
            _reached(one),
            Text(one["state"], style=STYLES[one["state"]]),
            _when(run.started),
            _number(one["wall_seconds"]),
        )
    return table


def detail(run: RunDirectory) -> list[RenderableType]:
    """All that is known of one run."""
    state = run.state
    parts: list[RenderableType] = [
        Text.assemble((run.name, "bold"), " (run, ", (state, STYLES[state]), ")"),
        Text(str(run.path.resolve())),
    ]
    parts.append(_pairs("plan", _plain_rows(_plan(run))))
    result = _result(run)
    if result is not None:
        parts.append(_pairs("result", _result_rows(result)))
    else:
        parts.append(_pairs("progress", _progress_rows(run)))
    kept = _checkpoints(run)
    parts.append(kept if kept is not None else Text("no checkpoints"))
    best = checkpoint.best(run.path)
    if best is not None:
        parts.append(Text(f"best: step {best.step:,}, {best.metric} {best.value:.6g} ({best.path})"))
    if state in ("failed", "broken off"):
        parts.extend(_log_ends(run.logs))
    return parts


def _checkpoints(run: RunDirectory) -> Table | None:
    known = checkpoint.steps(run.checkpoints)
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
        files = [file.stat() for file in path.iterdir()]
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
    for key in ("updates", "gradients", "dropped", "samples", "restarts", "rolled_back_updates"):
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
    if result.get("digest"):
        yield "digest", f"{str(result['digest'])[:16]}…"


def _progress_rows(run: RunDirectory) -> Iterator[tuple[str, str]]:
    history = _history(run)
    update, seconds = _last(history, "update"), _last(history, "seconds")
    yield "updates", _number(update) if update is not None else "none told yet"
    if seconds is not None:
        yield "seconds", _number(seconds)
    yield from _metric_rows(_last_metrics(history))


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


def _plan(run: RunDirectory) -> dict[str, Any]:
    try:
        return run.plan()
    except DataError:  # one broken run must not hide the others
        return {}


def _result(run: RunDirectory) -> dict[str, Any] | None:
    try:
        return run.result()
    except DataError:
        return None


def _history(run: RunDirectory) -> list[dict[str, Any]]:
    try:
        return run.history()
    except DataError:
        return []


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
