"""What a script writes to stdout and stderr: all of it goes to the log of its role, its lines to the launcher too.

Progress bars (tqdm) write a line again and again, with carriage returns, and those of several lines move the cursor up.
Such a line is sent as the state of a progress bar, and as a line when the script has gone on to the next one.
"""

from __future__ import annotations

import _thread
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TextIO

Stream = Literal["out", "err"]
Send = Callable[[dict[str, Any]], None]

EVERY = 0.2  # seconds between two states of a progress bar that are sent
LONGEST = 1 << 16  # characters of a line; a longer one is cut into several
_PARTS = re.compile(r"\n|\r|\x1b\[A|[^\n\r\x1b]+|\x1b")


@dataclass
class Row:
    """A line of a terminal that can still change."""

    text: str = ""
    rewritten: bool = False  # by a carriage return: it is a progress bar
    fresh: bool = False  # the next text replaces it
    writes: int = 0  # since the cursor came here


class Rows:
    """The last lines that a program has written, as a terminal would show them."""

    def __init__(self) -> None:
        self._rows, self._cursor = [Row()], 0

    def write(self, text: str) -> list[str]:
        """Take what a program writes; gives the lines that cannot change any more."""
        for part in _PARTS.findall(text.replace("\r\n", "\n")):
            row = self._rows[self._cursor]
            match part:
                case "\n":
                    self._go(self._cursor + 1)
                case "\x1b[A":
                    self._go(max(self._cursor - 1, 0))
                case "\r" if row.text and not row.text.strip():  # a bar that was erased
                    self._rows[self._cursor] = Row()
                case "\r":
                    row.rewritten = row.fresh = True
                case _:
                    row.text = part if row.fresh else row.text + part
                    row.fresh, row.writes = False, row.writes + 1
        return list(self._settled())

    @property
    def current(self) -> str:
        """The line that is being written."""
        return self._rows[self._cursor].text

    def above(self) -> list[str]:
        """The lines above the cursor, such as bars that have come to their end."""
        return list(self._taken(self._cursor))

    def rest(self) -> list[str]:
        """All lines: nothing more is written."""
        rows, self._rows, self._cursor = self._rows, [Row()], 0
        return [row.text for row in rows if row.text.strip()]

    def _go(self, place: int) -> None:
        self._cursor = place
        if place == len(self._rows):
            self._rows.append(Row())
        self._rows[place].writes = 0

    def _settled(self) -> Iterator[str]:
        """The lines above the cursor up to the last plain one. A bar above it may be rewritten: the cursor returns to
        it after each state of the bar below. It does not if this one has been written twice."""
        here = self._rows[self._cursor]
        above = self._rows[: self._cursor]
        plain = [number for number, row in enumerate(above) if not row.rewritten]
        yield from self._taken(len(above) if here.writes > 1 else plain[-1] + 1 if plain else 0)
        if len(here.text) > LONGEST:
            yield here.text
            here.text = ""

    def _taken(self, count: int) -> Iterator[str]:
        taken, self._rows, self._cursor = self._rows[:count], self._rows[count:], self._cursor - count
        yield from (row.text for row in taken if row.text.strip() or not row.rewritten)


class ScriptStream:
    """sys.stdout or sys.stderr of a script. `log` is the stream of the role's log."""

    def __init__(self, log: TextIO, kind: Stream, send: Send, lock: Any = None) -> None:
        self.log, self._kind, self._send = log, kind, send
        self._owner, self._lock = os.getpid(), lock or _thread.RLock()
        self.beside: ScriptStream | None = None  # the other one, on the same terminal
        self._rows, self._shown, self._sent = Rows(), "", 0.0

    def write(self, text: str) -> int:
        self.log.write(text)
        if os.getpid() == self._owner:  # the processes of a DataLoader inherit this stream, but not the launcher
            with self._lock:
                lines = self._rows.write(text)
                if lines and self.beside is not None:
                    self.beside._tell(self.beside._rows.above())  # they were finished before these lines
                self._tell(lines)
                self._show(self._rows.current)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def close(self) -> None:
        """Send what is left."""
        with self._lock:
            self._tell(self._rows.rest())
            self._show("", at_once=True)

    def _tell(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._send({"print": [self._kind, line]})

    def _show(self, line: str, *, at_once: bool = False) -> None:
        """Send the line that is being written, now and then."""
        now = time.monotonic()
        if line != self._shown and (at_once or now - self._sent >= EVERY or not line):
            self._shown, self._sent = line, now
            self._send({"print": ["bar", line]})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.log, name)


@contextmanager
def forwarded(send: Send) -> Iterator[None]:
    """Inside, what Python code prints is sent to the launcher as well."""
    before, lock = (sys.stdout, sys.stderr), _thread.RLock()
    out, err = ScriptStream(before[0], "out", send, lock), ScriptStream(before[1], "err", send, lock)
    out.beside, err.beside = err, out
    streams: Any = [out, err]
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in streams:
            stream.close()
