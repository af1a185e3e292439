"""The order log of a real run: what happened, in the order in which it happened, so that it can be repeated.

A run directory holds `order/LAUNCH/`: `server.log`, what the lead server did, and `worker-RANK-LIFE.log`, what a worker
did between its start and its end or death. A log is a row of frames, each written before anybody else can see what it
tells of: a killed process leaves whole frames, and never less than others have seen.

    frame:  length of the records, 2 bytes | records | CRC-32 of them, begun with that of the frame before, 4 bytes
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from paceline.errors import DataError

FORMAT = 1
ABOUT, START = "about.json", "start"  # what a launch was, and the checkpoint that it went on from
PROBES = 64  # coordinates of x whose sum stands beside a call now and then,
SELDOM = 32  # beside one in so many
GATHERED = 512  # records that are sealed at the latest
LARGEST = 1 << 16  # bytes of one frame
PIECE = 1 << 18  # bytes by which a log grows


class MemberEvent(IntEnum):
    """A change in who takes part: a worker joined, died or hung (left), or ended in order (parted)."""

    LEFT, JOINED, PARTED = -3, -4, -5


# of the server: one for each thing that it does, so that their number is its position
CALL, TELL, MEMBER, SAVE, SET, PROBED = range(1, 7)  # PROBED: a call with a checksum of x after it
# of a worker
READ, GRAD, POST, ASK, MEAN, STEP, CHANGE, DECIDED, END = range(16, 25)
NOTE = 32  # of either: plain data

ROSE, REFUSED = 1, 2  # flags of a call: x has changed, a gradient was dropped

_SHAPES = {
    CALL: struct.Struct("<BBHB"),  # kind, method, rank, flags
    PROBED: struct.Struct("<BBHBI"),
    TELL: struct.Struct("<BBH"),
    MEMBER: struct.Struct("<BbH"),  # kind, what befell it, rank
    SAVE: struct.Struct("<BH"),
    READ: struct.Struct("<BBq"),  # kind, method, position of the server
    GRAD: struct.Struct("<Bd"),  # kind, loss
    POST: struct.Struct("<BB"),
    ASK: struct.Struct("<BB"),  # only to be told when
    MEAN: struct.Struct("<Bq"),  # kind, this worker's number of it
    STEP: struct.Struct("<B"),
    END: struct.Struct("<B"),
}
_TEXTS = frozenset({SET, CHANGE, DECIDED, NOTE})  # JSON, behind its length
_TEXT = struct.Struct("<BH")
_LENGTH, _SUM = struct.Struct("<H"), struct.Struct("<I")
_AROUND = _LENGTH.size + _SUM.size


@lru_cache(maxsize=1024)
def _row_of(kinds: tuple[int, ...]) -> struct.Struct:
    """All of a frame's records at once: packing them one by one costs more than a small gradient bears."""
    return struct.Struct("<" + "".join(_SHAPES[kind].format.removeprefix("<") for kind in kinds))


def place(directory: Path | str, launch: int) -> Path:
    """Where the logs of a launch lie."""
    return Path(directory) / "order" / f"{launch:03d}"


def launches(directory: Path) -> list[Path]:
    """The launches of a run that were recorded, in their order."""
    found = (directory / "order").glob("[0-9][0-9][0-9]*")
    return sorted((path for path in found if path.name.isdecimal() and path.is_dir()), key=lambda path: int(path.name))


def returned(at: Path, generation: int) -> Path:
    """The checkpoint that a launch went back to."""
    return at / f"return-{generation}"


def probe_of(x: Tensor) -> Callable[[], int]:
    """A function that sums up a few coordinates of x as they are now: bits that differ show at once, or soon."""
    every = max(1, x.numel() // PROBES)
    seen = x.detach().view(-1)[::every][:PROBES].numpy()
    return lambda: zlib.crc32(seen.tobytes())


class OrderLogWriter:
    """A log that is being written. Records gather until `flush` seals them.

    The file is mapped: a frame costs no call of the system, and what is written survives the death of the process. Room
    is asked for ahead, in pieces, so that a full disk is an error here and not a signal later. Zeros follow the last
    frame; one that a death has cut through has no right sum, and nothing but zeros behind it. `close` cuts the room
    off; `trim` does it for a process that died. The lock says that a process still writes.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with suppress(OSError):  # some network file systems know no locks
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._room: mmap.mmap | bytearray = bytearray()
        self._size = self._at = self._sum = 0
        self._kinds: list[int] = []
        self._values: list[Any] = []
        self._broken = False
        self._grow()
        self.note({"format": FORMAT, **header})

    def add(self, kind: int, *values: Any) -> None:
        self._kinds.append(kind)
        self._values.append(kind)
        self._values.extend(values)
        if len(self._kinds) >= GATHERED:
            self.flush()

    def text(self, kind: int, content: dict[str, Any]) -> None:
        self.flush()
        encoded = json.dumps(content).encode()
        self._seal(_TEXT.pack(kind, len(encoded)) + encoded)

    def note(self, content: dict[str, Any]) -> None:
        self.text(NOTE, content)

    def flush(self) -> None:
        """Seal what was gathered: from here on it survives the death of this process."""
        if self._kinds:
            records = _row_of(tuple(self._kinds)).pack(*self._values)
            self._kinds.clear()
            self._values.clear()
            self._seal(records)

    def _seal(self, records: bytes) -> None:
        self._sum = zlib.crc32(records, self._sum)
        at, self._at = self._at, self._at + len(records) + _AROUND
        self._room[at : self._at] = _LENGTH.pack(len(records)) + records + _SUM.pack(self._sum)
        if self._at + LARGEST > self._size:
            self._grow()

    def _grow(self) -> None:
        """More room. A full disk ends the log, not the run: it can be repeated as far as the log goes."""
        if not self._broken:
            try:
                os.posix_fallocate(self._file, self._size, PIECE)
                self._size += PIECE
                self._room = mmap.mmap(self._file, self._size)
                return
            except OSError as error:
                self._broken, self._last = True, self._at
                self._room = bytearray(PIECE)
                print(f"the order log ends here: {error.strerror}", file=sys.stderr, flush=True)
        self._size, self._at = PIECE, 0  # nothing of this is kept

    def close(self) -> None:
        self.flush()
        if isinstance(self._room, mmap.mmap):
            self._room.close()
        os.ftruncate(self._file, self._last if self._broken else self._at)
        os.close(self._file)


class LogRecord(NamedTuple):
    kind: int
    values: tuple[Any, ...]


@dataclass(frozen=True)
class OrderLog:
    """A log that was read: its header, its records, and whether its end is missing."""

    path: Path
    header: dict[str, Any]
    records: list[LogRecord]
    cut: bool = False


def unused(path: Path) -> bool:
    """Whether nothing was ever written: a process may have been killed while it made its log."""
    return path.is_file() and not path.read_bytes().strip(b"\0")


def trim(path: Path) -> None:
    """Cut a log to its whole frames, if its process has died. A damaged one stays as it is, for `read` to report."""
    with path.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # its process lives: to cut off room that it has mapped would kill it
        except OSError:
            return  # without locks nobody can tell
        if os.fstat(file.fileno()).st_size % PIECE:
            return  # closed, or trimmed before
        content = file.read()
        with suppress(DataError):
            frames, _ = _frames(path, content)
            file.truncate(frames[-1][1] + _SUM.size if frames else 0)


def read(path: Path) -> OrderLog:
    """A log's records up to its last whole frame. Only a frame that a death may have cut through is left out; any other
    that is not whole is damage."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"the order log {path} cannot be read: {error.strerror}") from error
    frames, cut = _frames(path, content)
    records = [record for begin, end in frames for record in _records(path, content[begin:end])]
    if not records or records[0].kind != NOTE:
        raise DataError(f"the order log {path} has no header" + (": it was cut off" if cut else ""))
    header = records[0].values[0]
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        found = header.get("format") if isinstance(header, dict) else None
        raise DataError(f"the order log {path} is of format {found!r}; this version of paceline reads {FORMAT}")
    return OrderLog(path, header, records[1:], cut)


def _frames(path: Path, content: bytes) -> tuple[list[tuple[int, int]], bool]:
    """Where the records of each whole frame begin and end, and whether a death has cut through the one after them."""
    found: list[tuple[int, int]] = []
    running = at = 0
    while at < len(content):
        begin = at + _LENGTH.size
        size = _LENGTH.unpack_from(content, at)[0] if begin <= len(content) else 0
        end = begin + size
        if size and end + _SUM.size <= len(content):
            running = zlib.crc32(content[begin:end], running)
            if running == _SUM.unpack_from(content, end)[0]:
                found.append((begin, end))
                at = end + _SUM.size
                continue
        if not any(content[at:]):
            return found, False  # room that was never used
        # A dead process has left room behind the one frame that it was writing. A log without that room was closed, and
        # nothing in it can have been cut by a death.
        room = len(content) - at >= LARGEST and not any(content[at + LARGEST + _AROUND :])
        if not room or _has_frame(content.rstrip(b"\0"), at + 1):
            raise DataError(f"the order log {path} is not what was written: it is damaged at byte {at:,}")
        return found, True
    return found, False


def _has_frame(content: bytes, since: int) -> bool:
    """Whether a whole frame begins there or later: it is known by its sum, which begins with that of the one before."""
    for at in range(since + _SUM.size, len(content) - _AROUND + 1):
        begin = at + _LENGTH.size
        end = begin + _LENGTH.unpack_from(content, at)[0]
        if begin < end <= len(content) - _SUM.size:
            before, after = _SUM.unpack_from(content, at - _SUM.size)[0], _SUM.unpack_from(content, end)[0]
            if zlib.crc32(content[begin:end], before) == after:
                return True
    return False


def _records(path: Path, block: bytes) -> Iterator[LogRecord]:
    at = 0
    while at < len(block):
        kind = block[at]
        try:
            if kind in _TEXTS:
                _, length = _TEXT.unpack_from(block, at)
                at += _TEXT.size
                yield LogRecord(kind, (json.loads(block[at : at + length]),))
                at += length
            else:
                shape = _SHAPES[kind]
                values = shape.unpack_from(block, at)[1:]
                at += shape.size
                if kind == CALL:
                    values = (*values, None)
                yield LogRecord(CALL if kind == PROBED else kind, values)
        except (KeyError, ValueError, struct.error) as error:
            raise DataError(f"the order log {path} holds a record of an unknown kind ({kind})") from error
