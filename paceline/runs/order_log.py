"""The order log of a real run: its events in the order in which they happened, for replay.

A run directory holds `order/LAUNCH/`: `server-LIFE.log`, the actions of the lead server (`shared_order_log.py` writes
it where workers perform the calls themselves), and `worker-RANK-LIFE.log`, those of one process life of a worker. A
log is a sequence of frames. A frame is written before other processes can see what it records: a killed process leaves
whole frames, and every event that others have seen.

    frame:  length of the records, 2 bytes | records | CRC-32 of them, continued from the frame before, 4 bytes
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from torch import Tensor

from paceline.errors import DataError

FORMAT = 1
ABOUT, START = "about.json", "start"  # the description of a launch, and the checkpoint that it resumed from
PROBES = 64  # coordinates of x in a checksum
SELDOM = 32  # one call in SELDOM is followed by a checksum
GATHERED = 8192  # bytes of records that are collected before they are sealed in a frame
LARGEST = 1 << 16  # most bytes in one frame
PIECE = 1 << 18  # bytes by which a log grows


class MemberEvent(IntEnum):
    """A change of membership: a worker joined, died or hung (left), or ended in order (parted)."""

    LEFT, JOINED, PARTED = -3, -4, -5


class RecordKind(IntEnum):
    """The kind of a record: its first byte."""

    # of the server, one per action: the index of a record is the position of the server
    CALL, TELL, MEMBER, SAVE, SET, PROBED = range(1, 7)  # PROBED: a call followed by a checksum of x
    # of a worker
    READ, GRAD, POST, ASK, MEAN, STEP, CHANGE, DECIDED, END = range(16, 25)
    MEET = 25
    SENT, RECEIVED, TAKEN = range(26, 29)  # messages: one sent, how many were received, each of these
    STOPPED = 31  # a gradient that was given up; its mini-batch is the next gradient's
    NOTE = 32  # of both: plain data

    __hash__ = int.__hash__  # a frame is packed by a table of its kinds: Enum's own hash is slow


ROSE, REFUSED = 1, 2  # flags of a call: x has changed, a gradient was dropped

_SHAPES = {
    RecordKind.CALL: struct.Struct("<BBHB"),  # kind, method, rank, flags
    RecordKind.PROBED: struct.Struct("<BBHBI"),
    RecordKind.TELL: struct.Struct("<BBH"),
    RecordKind.MEMBER: struct.Struct("<BbH"),  # kind, MemberEvent, rank
    RecordKind.SAVE: struct.Struct("<BH"),
    RecordKind.READ: struct.Struct("<BBq"),  # kind, method, position of the server
    RecordKind.GRAD: struct.Struct("<Bd"),  # kind, loss
    RecordKind.STOPPED: struct.Struct("<B"),
    RecordKind.POST: struct.Struct("<BB"),
    RecordKind.ASK: struct.Struct("<BB"),  # a call that only asks to be told when to look
    RecordKind.MEAN: struct.Struct("<Bq"),  # kind, number of the mean, counted by this worker
    RecordKind.MEET: struct.Struct("<Bq"),  # kind, number of the meeting, counted as a mean
    RecordKind.SENT: struct.Struct("<Bb"),  # kind, slot; -1: it was refused
    RecordKind.RECEIVED: struct.Struct("<BI"),
    RecordKind.TAKEN: struct.Struct("<BHBq"),  # kind, sender, slot, number among the messages of that slot
    RecordKind.STEP: struct.Struct("<B"),
    RecordKind.END: struct.Struct("<B"),
}
_TEXTS = frozenset({RecordKind.SET, RecordKind.CHANGE, RecordKind.DECIDED, RecordKind.NOTE})  # length, then JSON
_TEXT = struct.Struct("<BH")
_LENGTH, _SUM = struct.Struct("<H"), struct.Struct("<I")
_pack_length, _pack_sum = _LENGTH.pack, _SUM.pack
_AROUND = _LENGTH.size + _SUM.size
_PACK = {kind: shape.pack for kind, shape in _SHAPES.items()}
SUM_SIZE = _SUM.size  # bytes of a checksum, the last ones of a frame


def packed(kind: RecordKind, *values: Any) -> bytes:
    """One record."""
    return _SHAPES[kind].pack(kind, *values)


def packed_text(kind: RecordKind, content: Mapping[str, Any]) -> bytes:
    """One record of plain data."""
    encoded = json.dumps(content).encode()
    return _TEXT.pack(kind, len(encoded)) + encoded


def framed(records: bytes, before: bytes) -> bytes:
    """A frame of these records. `before`: the checksum of the frame before, as it was written; empty for the first."""
    running = crc32(records, _SUM.unpack(before)[0] if before else 0)
    return _LENGTH.pack(len(records)) + records + _SUM.pack(running)


def place(directory: Path | str, launch: int) -> Path:
    """The folder of the logs of a launch."""
    return Path(directory) / "order" / f"{launch:03d}"


def launches(directory: Path) -> list[Path]:
    """The folders of the recorded launches of a run, in order."""
    found = (directory / "order").glob("[0-9][0-9][0-9]*")
    return sorted((path for path in found if path.name.isdecimal() and path.is_dir()), key=lambda path: int(path.name))


def returned(at: Path, generation: int) -> Path:
    """The checkpoint that a launch rolled back to in this generation."""
    return at / f"return-{generation}"


def probe_of(x: Tensor) -> Callable[[], int]:
    """A function that gives the checksum of a few coordinates of x as they are now."""
    every = max(1, x.numel() // PROBES)
    chosen = x.detach().view(-1)[::every][:PROBES]
    if chosen.is_cuda:
        return lambda: crc32(chosen.cpu().numpy().tobytes())
    seen = chosen.numpy()
    return lambda: crc32(seen.tobytes())


class OrderLogWriter:
    """Writes a log. Records are collected until `flush` seals them in a frame.

    The file is mapped: a frame costs no system call and survives the death of the process. Disk space is allocated
    ahead in pieces, so that a full disk is an error here and not a signal later. Zeros follow the last frame. A frame
    that was cut by a death has a wrong checksum and only zeros after it. `close` removes the unused space; `trim` does
    so for a process that died. A lock shows that a process still writes.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._room: mmap.mmap | bytearray = bytearray()
        self._size = self._at = self._sum = 0
        self._full = 0  # from here on the log needs more space
        self._collected = b""
        self._broken = False
        self._grow()
        self.note({"format": FORMAT, **header})

    def add(self, kind: RecordKind, *values: Any) -> None:
        self._collected += _PACK[kind](kind, *values)
        if len(self._collected) >= GATHERED:
            self.flush()

    def record(self, kind: RecordKind, *values: Any) -> None:
        """Write a record now, in a frame with those that were collected."""
        records, self._collected = self._collected + _PACK[kind](kind, *values), b""
        self._seal(records)

    def text(self, kind: RecordKind, content: dict[str, Any]) -> None:
        """Write a record of plain data, in a frame of its own."""
        self.flush()
        self._seal(packed_text(kind, content))

    def note(self, content: dict[str, Any]) -> None:
        self.text(RecordKind.NOTE, content)

    def flush(self) -> None:
        """Seal the collected records: from here on they survive the death of this process."""
        if self._collected:
            records, self._collected = self._collected, b""
            self._seal(records)

    def _seal(self, records: bytes) -> None:
        self._sum = added = crc32(records, self._sum)
        at, size = self._at, len(records)
        self._at = end = at + size + _AROUND
        self._room[at:end] = _pack_length(size) + records + _pack_sum(added)
        if end > self._full:
            self._grow()

    def _grow(self) -> None:
        """Allocate more space. A full disk ends the log, not the run: replay goes as far as the log does."""
        if not self._broken:
            try:
                os.posix_fallocate(self._file, self._size, PIECE)
                self._size += PIECE
                self._full = self._size - LARGEST
                self._room = mmap.mmap(self._file, self._size)
                return
            except OSError as error:
                self._broken, self._last = True, self._at
                self._room = bytearray(PIECE)
                print(f"the order log ends here: {error.strerror}", file=sys.stderr, flush=True)
        self._size, self._full, self._at = PIECE, PIECE - LARGEST, 0  # a scratch buffer: the log has ended

    def close(self) -> None:
        self.flush()
        if isinstance(self._room, mmap.mmap):
            self._room.close()
        os.ftruncate(self._file, self._last if self._broken else self._at)
        os.close(self._file)


class LogRecord(NamedTuple):
    kind: RecordKind
    values: tuple[Any, ...]

    @property
    def note(self) -> dict[str, Any]:
        """The content of a note; empty for a record of another kind."""
        return self.values[0] if self.kind == RecordKind.NOTE else {}


@dataclass(frozen=True)
class OrderLog:
    """A log that was read. `cut`: a death cut its last frame."""

    path: Path
    header: dict[str, Any]
    records: list[LogRecord]
    cut: bool = False


def unused(path: Path) -> bool:
    """Whether a log is empty: its process was killed while creating it."""
    return path.is_file() and not path.read_bytes().strip(b"\0")


def trim(path: Path) -> None:
    """Cut a log to its whole frames, if its process has died. A damaged log is left for `read` to report."""
    with path.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # its process lives, and would be killed if mapped space were cut off; or there are no locks
            return
        if os.fstat(file.fileno()).st_size % PIECE:
            return  # closed, or trimmed before
        with suppress(DataError):
            frames, _ = _frames(path, file.read())
            file.truncate(frames[-1][1] + _SUM.size if frames else 0)


def read(path: Path) -> OrderLog:
    """A log's records up to its last whole frame. A last frame that was cut by a death is omitted; any other broken
    frame is damage."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"the order log {path} cannot be read: {error.strerror}") from error
    frames, cut = _frames(path, content)
    records = [record for begin, end in frames for record in _records(path, content[begin:end])]
    if not records or records[0].kind != RecordKind.NOTE:
        raise DataError(f"the order log {path} has no header" + (": it was cut off" if cut else ""))
    header = records[0].note
    found = header.get("format") if isinstance(header, dict) else None
    if found != FORMAT:
        raise DataError(f"the order log {path} is of format {found!r}; this version of paceline reads {FORMAT}")
    return OrderLog(path, header, records[1:], cut)


def _frames(path: Path, content: bytes) -> tuple[list[tuple[int, int]], bool]:
    """Where the records of each whole frame begin and end, and whether a death cut the frame after them."""
    found: list[tuple[int, int]] = []
    running = at = 0
    while at < len(content):
        begin = at + _LENGTH.size
        size = _LENGTH.unpack_from(content, at)[0] if begin <= len(content) else 0
        end = begin + size
        if size and end + _SUM.size <= len(content):
            running = crc32(content[begin:end], running)
            if running == _SUM.unpack_from(content, end)[0]:
                found.append((begin, end))
                at = end + _SUM.size
                continue
        if not any(content[at:]):
            return found, False  # unused space
        # A dead process leaves unused space after the frame that it was writing. A log without that space was closed:
        # no frame in it can have been cut by a death.
        room = len(content) - at >= LARGEST and not any(content[at + LARGEST + _AROUND :])
        if not room or _has_frame(content.rstrip(b"\0"), at + 1):
            raise DataError(f"the order log {path} is not what was written: it is damaged at byte {at:,}")
        return found, True
    return found, False


def _has_frame(content: bytes, since: int) -> bool:
    """Whether a whole frame begins there or later: its checksum continues that of the frame before."""
    for at in range(since + _SUM.size, len(content) - _AROUND + 1):
        begin = at + _LENGTH.size
        end = begin + _LENGTH.unpack_from(content, at)[0]
        if begin < end <= len(content) - _SUM.size:
            before, after = _SUM.unpack_from(content, at - _SUM.size)[0], _SUM.unpack_from(content, end)[0]
            if crc32(content[begin:end], before) == after:
                return True
    return False


def _records(path: Path, block: bytes) -> Iterator[LogRecord]:
    at = 0
    while at < len(block):
        try:
            kind = RecordKind(block[at])
            if kind in _TEXTS:
                _, length = _TEXT.unpack_from(block, at)
                at += _TEXT.size
                yield LogRecord(kind, (json.loads(block[at : at + length]),))
                at += length
                continue
            values = _SHAPES[kind].unpack_from(block, at)[1:]
            at += _SHAPES[kind].size
            if kind == RecordKind.CALL:
                values = (*values, None)
            yield LogRecord(RecordKind.CALL if kind == RecordKind.PROBED else kind, values)
        except (ValueError, struct.error) as error:
            raise DataError(f"the order log {path} holds a record of an unknown kind ({block[at]})") from error
