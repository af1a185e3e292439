"""When a worker did what: `worker-RANK-LIFE.times` beside its order log, for `paceline trace`.

A header of HEADER bytes, JSON and spaces; then entries of two words each. The first is when an interval began, in ns of
the system's clock since boot; the second has its length in ns above 16 bits, a detail above 8, and its kind below. The
detail is the method of a call, the group of a mean or a meeting (1 + its lowest worker; 0: all workers), PART of a wait
for the others' parts of a mean, 1 of a meeting that was started. An interval inside another one comes before it. The
file is mapped: an entry costs no system call, and survives the death of the process. Nothing else reads it, and a
replay does not need it.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple

from paceline.errors import DataError

FORMAT = 1
SUFFIX = ".times"
HEADER = 4096  # bytes
PIECE = 1 << 16  # bytes by which a file grows
WORD = 8  # bytes


class Spent(IntEnum):
    """What a worker did: the kind of an entry. 0 is unused space."""

    GRADIENT, STOPPED, CALL, MEAN, MEETING, SLEEP, WAIT, CHECKPOINT, RETURN, EVALUATION = range(1, 11)
    STARTED = 11  # came to a mean or a meeting, and did not wait for it; its own entry follows when the worker does


PART = 1  # the detail of a wait for the others' parts of a mean


Stamp = Callable[[int, int], None]  # what (see `code`), and when it began: it ends now


def code(kind: Spent, detail: int = 0) -> int:
    """What an entry is of, as `Stamp` takes it."""
    return min(detail, 255) << 8 | kind


class Times:
    """Writes the file of one process life. `stamp` notes an interval."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with suppress(OSError):  # shows that the process lives; some network file systems have no locks
            fcntl.flock(self._file, fcntl.LOCK_EX)
        opened = monotonic_ns()
        told = {"format": FORMAT, **header, "opened": opened, "clock": time.time_ns() - opened, "boot": _boot()}
        os.pwrite(self._file, json.dumps(told).encode().ljust(HEADER), 0)
        self._size = HEADER
        self.stamp, self._words = self._stamper()

    def _stamper(self) -> tuple[Stamp, Callable[[], int]]:
        """A closure: it is faster than a method."""
        now, room, at = monotonic_ns, self._grow(), HEADER // WORD

        def stamp(what: int, began: int) -> None:
            nonlocal at, room
            try:
                room[at] = began
                room[at + 1] = now() - began << 16 | what  # last: with it the entry is whole
            except IndexError:
                try:
                    room = self._grow()
                except OSError:  # a full disk ends the timeline, not the run
                    return
                stamp(what, began)
                return
            at += 2

        return stamp, lambda: at

    def _grow(self) -> memoryview:
        os.posix_fallocate(self._file, self._size, PIECE)
        self._size += PIECE
        return memoryview(mmap.mmap(self._file, self._size)).cast("q")

    def close(self) -> None:
        os.ftruncate(self._file, self._words() * WORD)
        os.close(self._file)


class Entry(NamedTuple):
    kind: Spent
    detail: int
    start: int  # ns of that machine's clock
    end: int


@dataclass(frozen=True)
class WorkerTimes:
    """A file that was read."""

    header: dict[str, Any]
    entries: list[Entry]


def path_of(folder: Path, rank: int, life: int) -> Path:
    return folder / f"worker-{rank}-{life}{SUFFIX}"


def read(path: Path) -> WorkerTimes:
    """The entries of a file, in the order of their ends."""
    content = path.read_bytes()
    try:
        header = json.loads(content[:HEADER])
        if header["format"] != FORMAT:
            raise DataError(f"{path} is of format {header['format']!r}; this version of paceline reads {FORMAT}")
        entries = [
            Entry(Spent(about & 0xFF), about >> 8 & 0xFF, began, began + (about >> 16))
            for began, about in _used(content)
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not what was written: its header or an entry cannot be read") from error
    return WorkerTimes(header, entries)


def _used(content: bytes) -> list[tuple[int, int]]:
    """The words of each entry; unused space follows the last one."""
    whole = len(content) - HEADER
    words = array("q", content[HEADER : HEADER + max(whole - whole % (2 * WORD), 0)])
    pairs = list(zip(words[::2], words[1::2], strict=True))
    return pairs[: next((number for number, (_, about) in enumerate(pairs) if not about), len(pairs))]


def trim(path: Path) -> None:
    """Cut off the unused space that a killed process has left."""
    with suppress(OSError), path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a living process would be killed if its space were cut off
        content = file.read()
        if (used := HEADER + 2 * WORD * len(_used(content))) < len(content):
            file.truncate(used)


def _boot() -> str:
    """The machine and its start: the clocks of all processes with the same text are one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
