"""`progress.jsonl` of a run directory: how the run went, for people who look at it while it runs or later.

A line is one of three, told apart by its first key:

    launch    a launch has begun: its number and the names of its roles
    seconds   how the run stood: counts, speeds, and a letter for the state of each role (`names`: there are others now)
    event     something happened: a process died or was restarted, the run returned to a checkpoint, stopped, ended

Lines get rarer as a launch gets longer (`due`), so that an hour takes some 1,000 of them and a week 2,000. Nothing that
a run needs is here: a damaged or missing file is omitted from the picture, and a failure to write ends no run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.fields import finite

FILE = "progress.jsonl"
SHORTEST, SHARE = 0.25, 1 / 200  # seconds between two lines, and their share of the launch's time
EVALUATING = "v"  # the letter of a role that evaluates
MOST_EVENTS = 1000  # of a launch
LONGEST = 2000  # characters of an event's text


class ProgressLog:
    """Writes the lines of one launch."""

    def __init__(
        self, directory: Path, launch: int, began: float, seen: Callable[[Mapping[str, Any]], None] | None = None
    ) -> None:
        """`began`: when the launch began, by time.monotonic(); `seen` gets every line too."""
        self._path, self._launch, self._began, self._seen = directory / FILE, launch, began, seen
        self._next, self._events = 0.0, 0
        self._names: list[str] = []
        self._begun, self._early = False, list[dict[str, Any]]()  # events before `begin`

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def begin(self, roles: Sequence[str], goal: int | None) -> None:
        """The first line of the launch; events that came before are written after it."""
        self._begun, self._names = True, list(roles)
        self._write({"launch": self._launch, "at": time.time(), "roles": list(roles), "goal": goal})
        for line in self._early:
            self._write(line)

    def due(self) -> bool:
        """Whether it is time for a line."""
        return self.seconds >= self._next

    def note(self, values: Mapping[str, Any], roles: Sequence[str]) -> None:
        """How the run stands. Later lines have a letter for each of these roles."""
        seconds = self.seconds
        if list(roles) != self._names:  # an evaluator has joined that was not planned
            self._names, values = list(roles), {**values, "names": list(roles)}
        self._next = seconds + max(SHORTEST, seconds * SHARE)
        self._write({"seconds": round(seconds, 3), **values})

    def event(self, kind: str, text: str, role: str = "") -> None:
        self._events += 1
        if self._events > MOST_EVENTS:
            return
        if self._events == MOST_EVENTS:
            kind, text, role = "warn", f"{MOST_EVENTS:,} events: further ones are not recorded", ""
        line: dict[str, Any] = {
            "event": kind,
            "seconds": round(self.seconds, 3),
            "at": time.time(),
            "text": text[:LONGEST],
        }
        line |= {"role": role} if role else {}
        if self._begun:
            self._write(line)
        else:
            self._early.append(line)

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._seen is not None:
            self._seen(line)
        with suppress(OSError), self._path.open("ab+") as stream:  # a full disk, or the directory was deleted
            if stream.tell():
                stream.seek(-1, os.SEEK_END)
                if stream.read(1) != b"\n":  # a crash cut off the last line
                    stream.write(b"\n")
            stream.write(json.dumps(finite(line), allow_nan=False, separators=(",", ":")).encode() + b"\n")


class ProgressReader:
    """Reads the lines, and later those that were added since."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._file, self._read = 0, 0
        self.lines: list[dict[str, Any]] = []

    def refresh(self) -> list[dict[str, Any]]:
        """All lines so far. A line that is being written, or is damaged, is omitted."""
        try:
            with self._path.open("rb") as stream:
                about = os.fstat(stream.fileno())
                if about.st_ino != self._file or about.st_size < self._read:  # another file than before
                    self._file, self._read = about.st_ino, 0
                    self.lines = []
                stream.seek(self._read)
                added = stream.read()
        except OSError:
            self._read, self.lines = 0, []
            return self.lines
        whole = added[: added.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            with suppress(ValueError, RecursionError):
                values = json.loads(line)
                if isinstance(values, dict):
                    self.lines.append(values)
        return self.lines
