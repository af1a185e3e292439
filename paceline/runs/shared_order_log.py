"""The server's order log where several processes perform its calls: one file, mapped by all of them.

Whoever holds the server's lock writes. Three words of shared memory say which file it is, where its frames end, and how
much space it has. The running checksum is that of the last frame, which the file itself holds. The words change after
the frame is whole: a process that dies while it writes leaves the end of the log as it was.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from paceline.runs import order_log
from paceline.runs.order_log import FORMAT, LARGEST, PIECE, RecordKind

WORDS = 3
LIFE, AT, SIZE = range(WORDS)
BROKEN = -1  # as the number of the log: the disk is full, so the log has ended


class SharedOrderLog:
    """One process's view of the log `server-LIFE.log` in a folder. Every method is called under the server's lock."""

    def __init__(self, words: memoryview, folder: Path) -> None:
        self._words, self._folder = words, folder
        self._life = 0  # of the file that is open here
        self._file = -1
        self._room: mmap.mmap | None = None
        self._mapped = 0

    def add(self, kind: RecordKind, *values: Any) -> None:
        """Write one record, in a frame of its own."""
        self._seal(order_log.packed(kind, *values))

    def text(self, kind: RecordKind, content: Mapping[str, Any]) -> None:
        """Write a record of plain data, in a frame of its own."""
        self._seal(order_log.packed_text(kind, content))

    def begin(self, generation: int) -> None:
        """Create the log, unless a process has done so before."""
        if self._words[LIFE]:
            return
        for life in count(1):
            path = self._path(life)
            try:
                self._open(path, os.O_CREAT | os.O_EXCL)
                break
            except FileExistsError:
                with suppress(OSError):
                    order_log.trim(path)  # its process died before it could say that there is a log
        self._life = life
        self._words[AT] = self._words[SIZE] = 0
        self._words[LIFE] = life
        if self._grow():
            header = {"format": FORMAT, "role": "server", "life": life, "generation": generation}
            self.text(RecordKind.NOTE, header)

    def repair(self) -> None:
        """Remove the part of a frame that a process has written before it died inside a call."""
        if (room := self._mapping()) is not None:
            at = self._words[AT]
            room[at:] = bytes(len(room) - at)

    def close(self) -> None:
        """No process writes any more: remove the unused space."""
        if self._mapping() is not None and self._room is not None:
            self._room.close()
            os.ftruncate(self._file, self._words[AT])
        if self._file >= 0:
            os.close(self._file)
            self._file, self._room, self._life = -1, None, 0

    def _path(self, life: int) -> Path:
        return self._folder / f"server-{life}.log"

    def _open(self, path: Path, flags: int = 0) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file, self._room, self._mapped = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o644), None, 0
        with suppress(OSError):  # shared: shows that some process still writes. Some network file systems have no locks
            fcntl.flock(self._file, fcntl.LOCK_SH)

    def _mapping(self) -> mmap.mmap | None:
        """The file's space, as far as it reaches now; None: there is no log."""
        words = self._words
        if words[LIFE] <= 0:
            return None
        if words[LIFE] != self._life:
            self._open(self._path(words[LIFE]))
            self._life = words[LIFE]
        if words[SIZE] != self._mapped:
            self._room, self._mapped = mmap.mmap(self._file, words[SIZE]), words[SIZE]
        return self._room

    def _seal(self, records: bytes) -> None:
        if (room := self._mapping()) is None:
            return
        at = self._words[AT]
        frame = order_log.framed(records, room[at - order_log.SUM_SIZE : at] if at else b"")
        room[at : at + len(frame)] = frame
        self._words[AT] = at + len(frame)
        if at + len(frame) + LARGEST > self._mapped:
            self._grow()

    def _grow(self) -> bool:
        """Allocate more space. A full disk ends the log, not the run: replay goes as far as the log does."""
        try:
            os.posix_fallocate(self._file, self._words[SIZE], PIECE)
        except OSError as error:
            print(f"the order log ends here: {error.strerror}", file=sys.stderr, flush=True)
            with suppress(OSError):
                os.ftruncate(self._file, self._words[AT])
            self._words[LIFE] = BROKEN
            return False
        self._words[SIZE] += PIECE
        return True
