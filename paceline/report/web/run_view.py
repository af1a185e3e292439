"""What the page shows of one run, read from its directory as plain data.

Files are read only if they have changed. Nothing is written, and nothing that the run holds is waited for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import DataError
from paceline.processes.supervisor.status import LETTERS
from paceline.runs.progress_log import ProgressReader
from paceline.runs.run_directory import STATUS, RunDirectory, RunState

POINTS = 300  # of a curve, at most
EVENTS = 300  # newest ones that are shown
LOG_BYTES = 32 * 1024  # the end of a log
STALE = 15.0  # seconds after which a status is out of date
DELETED = "deleted"
STATES = {letter: str(state) for state, letter in LETTERS.items()}
FACTS = ("epochs", "restarts", "digest")  # of the result


class KeptFile:
    """The content of a file, read again when the file has changed; `otherwise` if it is missing or damaged."""

    def __init__(self, path: Path, read: Callable[[], Any], otherwise: Any) -> None:
        self._path, self._read, self._otherwise = path, read, otherwise
        self._mark: tuple[int, int, int] | None = None
        self._content = otherwise
        self.damaged = False

    def get(self) -> Any:
        try:
            about = self._path.stat()
            mark = about.st_ino, about.st_mtime_ns, about.st_size
            if mark != self._mark:
                self._content, self.damaged = self._read(), False
                self._mark = mark
        except DataError:  # read again at the next look: it may have been replaced while it was read
            self._content, self.damaged, self._mark = self._otherwise, True, None
        except OSError:
            self._content, self.damaged, self._mark = self._otherwise, False, None
        return self._content


class RunView:
    """One run, as the page shows it."""

    def __init__(self, run: RunDirectory, key: str) -> None:
        self.run, self.key = run, key
        self._plan = KeptFile(run.path / "plan.json", lambda: run.plan(checked=False), {})
        self._result = KeptFile(run.path / "result.json", lambda: run.result(checked=False), None)
        self._history = KeptFile(run.path / "history.jsonl", run.history, [])
        self._progress = ProgressReader(run.path)

    @property
    def plan(self) -> dict[str, Any]:
        found = self._plan.get()
        return found if isinstance(found, dict) else {}

    def state(self) -> str:
        if not self.run.path.is_dir():
            return DELETED
        if self.run.is_locked():
            return RunState.RUNNING
        result = self._result.get()
        if self._result.damaged:
            return RunState.DAMAGED
        if result is None:
            return RunState.BROKEN_OFF
        if result.get("error"):
            return RunState.FAILED
        return RunState.INTERRUPTED if result.get("stopped") == RunState.INTERRUPTED else RunState.DONE

    def _status(self, state: str) -> dict[str, Any]:
        """The last status of a run that has no result."""
        if state not in (RunState.RUNNING, RunState.BROKEN_OFF) or not (self.run.path / STATUS).exists():
            return {}
        return self.run.status() or {}

    def summary(self) -> dict[str, Any]:
        """The run in a line."""
        state = self.state()
        plan, told, result = self.plan, self._status(state), self._result.get() or {}
        history = self._history.get()
        metrics = result.get("metrics") or told.get("metrics") or _last_metrics(history)
        with suppress(OSError):
            started = self.run.started.timestamp()
            return {
                "key": self.key,
                "name": self.run.name,
                "path": str(self.run.path.resolve()),
                "state": state,
                "task": result.get("task") or plan.get("task") or plan.get("title"),
                "scheme": result.get("scheme") or plan.get("scheme"),
                "workers": plan.get("processes") or plan.get("workers"),
                "servers": plan.get("servers"),
                "updates": _number(result.get("updates", told.get("updates"))),
                "goal": _number(plan.get("steps")),
                "samples": _number(result.get("samples", told.get("samples"))),
                "seconds": _number(result.get("wall_seconds", told.get("seconds"))),
                "rate": _number(result.get("samples_per_second", told.get("samples_per_second"))),
                "metrics": _numbers(metrics),
                "stopping": told.get("stopping", "") if state == RunState.RUNNING else "",
                "started": started,
            }
        return {"key": self.key, "name": self.run.name, "path": str(self.run.path), "state": DELETED, "metrics": {}}

    def detail(self) -> dict[str, Any]:
        """All that is shown of the run, beside `summary`."""
        state = self.state()
        told, result = self._status(state), self._result.get() or {}
        progress = course(self._progress.refresh())
        final = progress.pop("roles")
        roles = told["roles"] if isinstance(told.get("roles"), list) else final
        ages = told["ages"] if isinstance(told.get("ages"), list) else []
        stale = result.get("staleness")
        if not ages and isinstance(stale, dict) and isinstance(stale.get("histogram"), dict):
            ages = _row(stale["histogram"])
        for one in progress["events"]:
            if one["event"] == "stop" and one["text"] and one["text"] == result.get("error"):
                one["event"] = "failed"
        return {
            "age": told.get("age"),
            "stale": bool(told) and told["age"] > STALE,
            "status": {name: _number(told.get(name)) for name in ("seconds_left", "checkpoint_age", "epochs")},
            "roles": [one for one in roles if isinstance(one, dict) and {"name", "state"} <= one.keys()],
            "ages": ages,
            "evaluations": evaluations(self._history.get(), progress["launches"]),
            "error": result.get("error"),
            "stopped": result.get("stopped"),
            "facts": {name: result[name] for name in FACTS if result.get(name) is not None},
            "logs": self.logs(),
            "letters": STATES,
            **progress,
        }

    def about(self) -> dict[str, Any]:
        """The plan, without what has its default or is empty."""
        return {name: value for name, value in self.plan.items() if value not in (None, "", [], {}, False)}

    def logs(self) -> list[str]:
        """The names of the log files, those of the first roles first."""
        folder = self.run.logs
        found = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
        return sorted((str(path.relative_to(folder)) for path in found), key=_by_role)

    def log(self, name: str) -> dict[str, Any]:
        """The end of a log; only files of the folder of logs can be named."""
        if name not in self.logs():
            return {"file": name, "text": "", "bytes": 0}
        text, size = b"", 0
        with suppress(OSError), (self.run.logs / name).open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - LOG_BYTES))
            text = stream.read(LOG_BYTES)
        if size > LOG_BYTES:
            text = text.partition(b"\n")[2]
        return {"file": name, "text": text.decode(errors="replace"), "bytes": size}


def course(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Curves and events from the lines of `progress.jsonl`. Times of a later launch follow those of the one before."""
    points: list[tuple[float, Mapping[str, Any]]] = []
    events: list[dict[str, Any]] = []
    launches: list[dict[str, Any]] = []
    names: Sequence[str] = ()
    roles: list[Any] = []
    offset = last = 0.0
    for line in lines:
        if "launch" in line:
            offset, last = offset + last, 0.0
            names = line["roles"] if isinstance(line.get("roles"), list) else ()
            launches.append({"number": line["launch"], "t": offset, "at": line.get("at"), "roles": list(names)})
            roles = []
            continue
        seconds = line.get("seconds")
        if not isinstance(seconds, int | float):
            continue
        last = max(last, float(seconds))
        if "event" in line:
            kept = {name: line.get(name) for name in ("event", "at", "text", "role")}
            events.append({"t": offset + seconds, **kept})
        else:
            points.append((offset + seconds, line))
            names = line["names"] if isinstance(line.get("names"), list) else names
            roles = line["roles"] if isinstance(line.get("roles"), list) else roles
    step = max(1, -(-len(points) // POINTS))
    kept_points = [*points[:-1:step], *points[-1:]]
    curves = {name: [line.get(name) for _, line in kept_points] for name in ("updates", "samples", "loss", "staleness")}
    curves["rate"] = [line.get("samples_per_second") for _, line in kept_points]
    curves["t"] = [round(t, 3) for t, _ in kept_points]
    return {
        "launches": launches,
        "names": list(names),
        "curves": curves,
        "states": [line.get("states") or "" for _, line in kept_points],
        "events": events[-EVENTS:],
        "events_omitted": max(0, len(events) - EVENTS),
        "roles": roles,
    }


def evaluations(history: Sequence[Mapping[str, Any]], launches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Curves of the metrics. The seconds of the history begin again with every launch."""
    starts = [float(one["t"]) for one in launches] or [0.0]
    launch, before = 0, 0.0
    points: list[tuple[float, Mapping[str, Any]]] = []
    for line in history:
        seconds = float(line["seconds"])
        if seconds < before:
            launch += 1
        before = seconds
        while launch + 1 < len(starts) and starts[launch] + seconds > starts[launch + 1] + 1.0:
            launch += 1
        points.append((starts[min(launch, len(starts) - 1)] + seconds, line))
    step = max(1, -(-len(points) // POINTS))
    points = [*points[:-1:step], *points[-1:]]
    names = list(dict.fromkeys(name for _, line in points for name in _numbers(line)))
    curves = {name: [_number(line.get(name)) for _, line in points] for name in names if name != "seconds"}
    return {"t": [round(t, 3) for t, _ in points], "curves": curves}


def _by_role(name: str) -> tuple[bool, str, int]:
    stem, _, number = name.rpartition("-")
    digits = number.partition(".")[0]
    return not name.startswith("chief"), stem, int(digits) if digits.isdecimal() else 0


def _row(histogram: Mapping[str, Any]) -> list[int]:
    """A histogram of a result, whose keys are texts, as a row of counts."""
    counted = {int(age): int(count) for age, count in histogram.items() if str(age).isdecimal()}
    row = [0] * min(max(counted, default=-1) + 1, 65)
    for age, count in counted.items():
        row[min(age, len(row) - 1)] += count
    return row


def _numbers(values: Any) -> dict[str, float]:
    given = values if isinstance(values, Mapping) else {}
    return {str(name): value for name, value in given.items() if _number(value) is not None}


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _last_metrics(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    for line in reversed(history):
        if "loss" in line:
            return {name: value for name, value in line.items() if name not in ("update", "seconds")}
    return {}
