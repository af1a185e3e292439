"""One run directory in detail, for `paceline show`."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from paceline.processes.supervisor.status import duration
from paceline.report.profile_table import profile_table
from paceline.report.run_tables import STYLES, facts, last, last_metrics, moment, number, readable
from paceline.result import Profile, size_text
from paceline.runs import checkpoint
from paceline.runs.run_directory import RunDirectory, RunState

LOG_LINES, LOG_BYTES = 10, 8192  # the end of each log that is shown of a failed run
STALE = 15.0  # seconds after which status.json is out of date


def detail(run: RunDirectory) -> list[RenderableType]:
    state = run.state
    parts: list[RenderableType] = [
        Text.assemble((run.name, "bold"), " (run, ", (state, STYLES[state]), ")"),
        Text(str(run.path.resolve())),
    ]
    damage: list[str] = []
    parts.append(facts("plan", _plain_rows(readable(run, damage, run.plan, {}))))
    result = readable(run, damage, run.result)
    history = readable(run, damage, lambda: run.history(damage.append), [])
    told = ("progress", _progress_rows(run, history)) if result is None else ("result", _result_rows(result))
    parts.append(facts(*told))
    if result is not None and result.get("profile"):
        with suppress(KeyError, TypeError, AttributeError):  # a damaged file
            parts += list(profile_table(Profile(**result["profile"]), run.path))
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
        try:
            files = [file.stat() for file in path.iterdir()] if path is not None else []
        except OSError:
            files = []
        if not files:  # the run has just deleted it
            continue
        written = datetime.fromtimestamp(max(file.st_mtime for file in files), UTC)
        table.add_row(f"{step:,}", size_text(sum(file.st_size for file in files)), moment(written))
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
    for key in ("samples", "epochs"):
        if result.get(key) is not None:
            yield key, number(result[key])
    yield from _metric_rows(result.get("metrics") or {})
    for key in ("updates", "gradients", "dropped", "restarts", "rolled_back_updates", "lost_updates"):
        if result.get(key) is not None:
            yield key.replace("_", " "), number(result[key])
    units = {"wall_seconds": " s", "time_to_first_step": " s", "samples_per_second": "", "peak_rss_mb": " MB"}
    for key, unit in units.items():
        if result.get(key) is not None:
            yield key.replace("_", " "), number(result[key]) + unit
    stale = result.get("staleness")
    if isinstance(stale, dict):
        yield "staleness mean / max", f"{number(stale.get('mean'))} / {number(stale.get('max'))}"
    traffic = result.get("traffic")
    if isinstance(traffic, dict) and traffic.get("sent"):
        yield "sent by a worker, on average", size_text(sum(traffic["sent"]) / len(traffic["sent"]))
    for key in ("digest", "fingerprint"):
        if result.get(key):
            yield key, f"{str(result[key])[:16]}…"


def _progress_rows(run: RunDirectory, history: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """The progress of a run without a result: from status.json, or else from its history."""
    told = run.status()
    if told is not None:
        with suppress(KeyError, TypeError, ValueError, AttributeError):  # a damaged file
            yield from list(_status_rows(told))
            return
    update, seconds = last(history, "update"), last(history, "seconds")
    yield "updates", number(update) if update is not None else "none reported yet"
    if seconds is not None:
        yield "seconds", number(seconds)
    yield from _metric_rows(last_metrics(history))


def _status_rows(told: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    age = told["age"]
    if age > STALE:
        yield "last seen", f"{duration(age, '.0f')} ago"
    for key in ("samples", "epochs"):
        if told.get(key) is not None:  # another version may have written it
            yield key, number(told[key])
    goal, updates = told["goal"], told["updates"]
    share = f" of {goal:,} ({100 * updates // goal}%)" if goal else ""
    yield "updates", number(updates) + share
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
        reason = f" for {one['waits_for']}" if one.get("waits_for") else ""
        yield str(one["name"]), f"{one['state']}{reason}{step}{again}"
    yield from _metric_rows(told.get("metrics") or {})


def _metric_rows(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in metrics.items():
        share = name == "accuracy" and isinstance(value, int | float)
        yield name, f"{value:.2%}" if share else number(value)


def _log_ends(logs: Path) -> Iterator[RenderableType]:
    found = sorted(path for path in logs.rglob("*") if path.is_file()) if logs.is_dir() else []
    for path in found:
        text = ""
        with suppress(OSError), path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - LOG_BYTES))
            text = stream.read().decode(errors="replace")
        if lines := [line for line in text.splitlines() if line.strip()][-LOG_LINES:]:
            yield Text(f"end of {path}", style="bold")
            yield Text("\n".join(lines))
