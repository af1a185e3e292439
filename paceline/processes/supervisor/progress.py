"""The progress of a run for other programs (`status.json`), and a warning when its newest checkpoint is old."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict

from paceline.config.plan import Plan
from paceline.fields import finite
from paceline.hook import Hook
from paceline.hooks.checkpoint_saver import CheckpointSaver
from paceline.processes.supervisor.status import Status, UpdateRate, duration, time_left
from paceline.runs.run_directory import STATUS, RunDirectory

EVERY = 2.0  # seconds between two writings


class Progress:
    """Called with every look at a run. A failure here does not end the run."""

    def __init__(self, directory: RunDirectory, plan: Plan, hooks: Iterable[Hook], warn: Callable[[str], None]) -> None:
        self._path, self._patience, self._warn = directory.path / STATUS, plan.patience, warn
        saver = next((hook for hook in hooks if isinstance(hook, CheckpointSaver)), None)
        self._steps = saver.every if saver is not None else None
        self._seconds = saver.seconds or 60.0 if saver is not None and not saver.every else None
        self._pace = UpdateRate()
        self._written = -math.inf
        self._warned = 0.0  # the age at the last warning

    def note(self, status: Status) -> None:
        now = time.monotonic()
        self._pace.note(now, status.updates)
        self._watch_checkpoint(status)
        if now - self._written < EVERY:
            return
        self._written = now
        told = asdict(status) | {"at": time.time(), "seconds_left": time_left(status, self._pace, now)}
        aside = self._path.with_name(f".{STATUS}.new")
        with contextlib.suppress(OSError):  # a full disk, for one: checkpoints will say so
            aside.write_text(json.dumps(finite(told), allow_nan=False), encoding="utf-8")
            aside.replace(self._path)

    def end(self) -> None:
        """The run has a result from now on."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _watch_checkpoint(self, status: Status) -> None:
        """Warn when one is overdue by two patiences, and again each time that its age has doubled."""
        age, behind = status.checkpoint_age, status.updates - status.checkpoint
        if math.isnan(age) or behind <= 0 or not (self._steps or self._seconds):
            return
        if age < self._warned / 2:  # there is a newer one
            self._warned = 0.0
        late = age > 2 * self._patience + (self._seconds or 0.0) and behind > 2 * (self._steps or 0)
        if late and age >= 2 * self._warned:
            self._warned = age
            often = f"{self._steps:,} updates" if self._steps else f"{self._seconds:g} s"
            self._warn(
                f"the newest checkpoint, of update {status.checkpoint:,}, is {duration(age, '.0f')} old, although one "
                f"is due every {often}; {behind:,} updates would be lost with a server"
            )
