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
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from paceline.errors import DataError

FORMAT = 1
ABOUT, START = "about.json", "start"  # what a launch was, and the checkpoint that it went on from
PROBES = 64  # coordinates of x whose sum stands beside every call
GATHERED = 1000  # records that are written at the latest
PIECE = 1 << 18  # bytes by which a log grows

# of the server: one for each thing that it does, so that their number is its position
CALL, TELL, MEMBER, SAVE, SET = range(1, 6)
# of a worker
READ, GRAD, POST, ASK, MEAN, STEP, CHANGE, DECIDED, END = range(16, 25)
NOTE = 32  # of either: plain data

ROSE, REFUSED = 1, 2  # flags of a call: x has changed, a gradient was dropped

_SHAPES = {
    CALL: struct.Struct("<BBHBI"),  # kind, method, rank, flags, probe
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
    """A log that is being written. Records gather until `flush`.

    The file is mapped: a frame costs no call of the system, and what is written survives the death of the process. Room
    is asked for ahead, in pieces, so that a full disk is an error here and not a signal later. A frame's length is
    written last; what is behind the last frame is zeros.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._map: mmap.mmap | None = None
        self._size = self._at = self._sum = 0
        self._gathered: list[bytes] = []
        self._grow()
        self.note({"format": FORMAT, **header})
        self.flush()

    def add(self, kind: int, *values: Any) -> None:
        self._gathered.append(_SHAPES[kind].pack(kind, *values))
        if len(self._gathered) >= GATHERED:
            self.flush()

    def text(self, kind: int, content: dict[str, Any]) -> None:
        encoded = json.dumps(content).encode()
        self._gathered.append(_TEXT.pack(kind, len(encoded)) + encoded)

    def note(self, content: dict[str, Any]) -> None:
        self.text(NOTE, content)

    def flush(self) -> None:
        """Write what was gathered: from here on it survives the death of this process."""
        if not self._gathered:
            return
        records = b"".join(self._gathered)
        self._gathered.clear()
        at, length = self._at, len(records)
        end = at + _LENGTH.size + length + _SUM.size
        if end + _LENGTH.size > self._size:
            self._grow()
        if self._map is None:
            return
        self._sum = zlib.crc32(records, self._sum)
        self._map[at + _LENGTH.size : end] = records + _SUM.pack(self._sum)
        _LENGTH.pack_into(self._map, at, length)
        self._at = end

    def _grow(self) -> None:
        """More room. A full disk ends the log, not the run: it can be repeated as far as the log goes."""
        if self._size and self._map is None:
            return
        try:
            os.posix_fallocate(self._file, self._size, PIECE)
            self._size += PIECE
            self._map = mmap.mmap(self._file, self._size)
        except OSError as error:
            self._map, self._size = None, max(self._size, 1)
            print(f"the order log ends here: {error.strerror}", file=sys.stderr, flush=True)

    def close(self) -> None:
        self.flush()
        if self._map is not None:
            self._map.close()
        os.ftruncate(self._file, self._at)
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
        if not size and not any(content[at:]):
            break  # room that was never used
        if not size or end > len(content) or end + size + _SUM.size > len(content):
            cut = True
            break
        block = content[end : end + size]
        running = zlib.crc32(block, running)
        if running != _SUM.unpack_from(content, end + size)[0]:
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
                yield Record(kind, shape.unpack_from(block, at)[1:])
                at += shape.size
        except (KeyError, ValueError, struct.error) as error:
            raise DataError(f"the order log {path} holds a record of an unknown kind ({kind})") from error
