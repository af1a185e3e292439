"""What the launcher writes for TensorBoard: the course of the run as a whole, as `progress.jsonl` has it, and at the
end its hyper-parameters with its final metrics.

    summaries/run     loss, speed, staleness and waits of all roles as curves; events, roles, scheme, settings as texts
    summaries/final   one session of the hparams plugin, the end of each role's log; a later launch replaces it
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.config.plan import Plan
from paceline.fields import finite
from paceline.processes.supervisor.status import LETTERS, RoleState
from paceline.result import Result
from paceline.runs.event_file import EventFile, SessionStatus
from paceline.runs.run_directory import RunState

CURVES = {"loss": "loss", "samples_per_second": "samples_per_second", "staleness": "staleness_mean"}
COUNTS = ("updates", "samples", "checkpoint")
SETTINGS = ("seed", "batch", "compress", "exact", "quorum", "collective", "device", "threads")
LOGS, LOG_BYTES = 64, 8192  # roles whose logs are shown, and the end of each
FINAL = ("updates", "samples", "gradients", "wall_seconds", "samples_per_second", "restarts", "rolled_back_updates")


class RunSummaries:
    """Writes them. Nothing that the run needs is here: a failure to write ends no run."""

    def __init__(self, plan: Plan, listing: str) -> None:
        """`listing`: the source of the scheme."""
        self._plan, self._listing, self._began = plan, listing, time.time()
        self._folder = Path(plan.directory) / "summaries"
        self._file: EventFile | None = None
        self._names: Sequence[str] = ()
        self._waits, self._looks, self._step = Counter[str](), 0, 0

    def line(self, line: Mapping[str, Any]) -> None:
        """Take a line of `progress.jsonl`."""
        with suppress(OSError):
            if "launch" in line:
                self._begin(line)
            elif self._file is not None and "event" in line:
                role = f" ({line['role']})" if line.get("role") else ""
                self._file.text("events", f"**{line['event']}**{role}: {line['text']}", self._step, line["at"])
            elif self._file is not None:
                self._step = line["updates"]
                self._file.scalars(self._values(line), self._step, time.time())
                if "roles" in line:
                    self._file.text("roles", _table(line["roles"]), self._step, time.time())

    def _begin(self, line: Mapping[str, Any]) -> None:
        self._file, self._names = EventFile(self._folder / "run"), line["roles"]
        settings = {name: value for name, value in vars(self._plan).items() if value not in (None, "", [], {}, False)}
        self._file.text("settings", _code("json", json.dumps(settings, indent=1)), 0, line["at"])
        if self._listing:
            self._file.text("scheme", _code("python", self._listing), 0, line["at"])

    def _values(self, line: Mapping[str, Any]) -> dict[str, float]:
        """The numbers of a line, and which part of the time every role has waited so far in this launch."""
        values = {tag: line[name] for name, tag in CURVES.items() if line[name] is not None}
        values |= {name: line[name] for name in COUNTS}
        self._names = line.get("names", self._names)
        self._looks += 1
        self._waits.update(
            name
            for name, letter in zip(self._names, line["states"], strict=True)
            if letter == LETTERS[RoleState.WAITING]
        )
        return values | {f"waiting/{name}": self._waits[name] / self._looks for name in self._names}

    def end(self, hyper: Mapping[str, Any], result: Result | None, error: str) -> None:
        """Write the session of the hparams plugin. `hyper`: the scheme's; `error`: why the run failed, if it did."""
        with suppress(OSError):
            for old in (self._folder / "final").glob("*.paceline"):
                old.unlink()
            file = EventFile(self._folder / "final")
            final, now = _final(result), time.time()
            interrupted = result is None or result.stopped == RunState.INTERRUPTED
            status = SessionStatus.UNKNOWN if interrupted else SessionStatus.SUCCESS
            status = SessionStatus.FAILURE if error else status
            settings = _settings(self._plan, result) | {name: _plain(value) for name, value in hyper.items()}
            known = {name: value for name, value in settings.items() if value is not None}
            file.session(Path(self._plan.directory).resolve().name, known, status, self._began, now)
            file.scalars(final, result.updates if result else 0, now)
            step = result.updates if result else 0
            if error:
                file.text("error", _code("", error), step, now)
            folder = Path(self._plan.directory) / "logs"
            for log in sorted(folder.rglob("*.log"))[:LOGS]:
                with log.open("rb") as stream:
                    stream.seek(max(stream.seek(0, os.SEEK_END) - LOG_BYTES, 0))
                    text = stream.read().decode(errors="replace")
                if text:
                    file.text(f"log/{log.relative_to(folder).with_suffix('')}", _code("", text), step, now)


def _final(result: Result | None) -> dict[str, float]:
    if result is None:
        return {}
    values = {name: getattr(result, name) for name in FINAL}
    values |= {"staleness_mean": result.staleness.mean, "staleness_max": result.staleness.max, **result.metrics}
    kept = {name: value for name, value in values.items() if isinstance(value, int | float) and math.isfinite(value)}
    return {f"final/{name}": float(value) for name, value in kept.items()}


def _settings(plan: Plan, result: Result | None) -> dict[str, str | float | bool | None]:
    task = result.task if result is not None else plan.task or plan.title
    settings: dict[str, Any] = {"task": task, "scheme": result.scheme if result is not None else plan.scheme}
    settings |= {"workers": plan.hosts, "servers": plan.servers}
    settings |= {name: getattr(plan, name) for name in SETTINGS}
    settings["batch"] = result.batch if result is not None else plan.batch
    return {name: _plain(value) for name, value in settings.items()}


def _plain(value: Any) -> str | float | bool | None:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return float(value) if math.isfinite(value) else str(value)
    return json.dumps(finite(value), default=str)


def _table(roles: Sequence[Mapping[str, Any]]) -> str:
    rows = ["| role | node | state | step | restarts | waits for |", "|---|---|---|---|---|---|"]
    for role in roles:
        step = role["step"] if role["step"] >= 0 else ""
        cells = (role["name"], role["node"], role["state"], step, role["restarts"], role["waits_for"])
        rows.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _code(language: str, text: str) -> str:
    fence = "~~~~~~"
    return f"{fence}{language}\n{text}\n{fence}"
