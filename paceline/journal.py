"""The order log of a real run: what happened, in the order in which it happened, so that it can be repeated.

A run directory holds `order/LAUNCH/`: `server.log`, what the lead server did, and `worker-RANK-LIFE.log`, what a worker
did between its start and its end or death. A log is a row of frames, each written before anybody else can see what it
tells of: a killed process leaves whole frames, and never less than others have seen.

    frame:  length of the records, 2 bytes | records | CRC-32 of them, begun with that of the frame before, 4 bytes
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


def returned(at: Path, generation: int) -> Path:
    """The checkpoint that a launch went back to."""
    return at / f"return-{generation}"


def probe_of(x: Tensor) -> Callable[[], int]:
    """A function that sums up a few coordinates of x as they are now: bits that differ show at once, or soon."""
    every = max(1, x.numel() // PROBES)
    seen = x.detach().view(-1)[::every][:PROBES].numpy()
    return lambda: zlib.crc32(seen.tobytes())


class Journal:
    """A log that is being written. Records gather until `flush` seals them.

    The file is mapped: a frame costs no call of the system, and what is written survives the death of the process. Room
    is asked for ahead, in pieces, so that a full disk is an error here and not a signal later. Zeros follow the last
    frame; one that a death has cut through has no right sum, and nothing but zeros behind it.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
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


class Record(NamedTuple):
    kind: int
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Log:
    """A log that was read: its header, its records, and whether its end is missing."""

    path: Path
    header: dict[str, Any]
    records: list[Record]
    cut: bool = False


def unused(path: Path) -> bool:
    """Whether nothing was ever written: a process may have been killed while it made its log."""
    return path.is_file() and not path.read_bytes().strip(b"\0")


def read(path: Path) -> Log:
    """A log's records up to its last whole frame. What is altered before that is no log of this run any more."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"the order log {path} cannot be read: {error.strerror}") from error
    records: list[Record] = []
    running = at = 0
    cut = False
    while at < len(content):
        end = at + _LENGTH.size
        size = _LENGTH.unpack_from(content, at)[0] if end <= len(content) else 0
        if not size and end <= len(content):
            break  # room that was never used, or what a dead process had not sealed
        if end > len(content) or end + size + _SUM.size > len(content):
            cut = True
            break
        block = content[end : end + size]
        running = zlib.crc32(block, running)
        if running != _SUM.unpack_from(content, end + size)[0]:
            if not any(content[end + size + _SUM.size :]):
                cut = True  # a death has cut through the last one
                break
            raise DataError(f"the order log {path} is not what was written: its sum does not fit at byte {at:,}")
        records += _records(path, block)
        at = end + size + _SUM.size
    if not records or records[0].kind != NOTE:
        raise DataError(f"the order log {path} has no header" + (": it was cut off" if cut else ""))
    header = records[0].values[0]
    if header.get("format") != FORMAT:
        raise DataError(
            f"the order log {path} is of format {header.get('format')!r}; this version of paceline reads {FORMAT}"
        )
    return Log(path, header, records[1:], cut)


def _records(path: Path, block: bytes) -> Iterator[Record]:
    at = 0
    while at < len(block):
        kind = block[at]
        try:
            if kind in _TEXTS:
                _, length = _TEXT.unpack_from(block, at)
                at += _TEXT.size
                yield Record(kind, (json.loads(block[at : at + length]),))
                at += length
            else:
                shape = _SHAPES[kind]
                values = shape.unpack_from(block, at)[1:]
                at += shape.size
                if kind == CALL:
                    values = (*values, None)
                yield Record(CALL if kind == PROBED else kind, values)
        except (KeyError, ValueError, struct.error) as error:
            raise DataError(f"the order log {path} holds a record of an unknown kind ({kind})") from error
