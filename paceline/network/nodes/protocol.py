"""The messages between the coordinator and the agents of other nodes.

Each agent has two connections to the coordinator: one for short messages, which is never busy for long and therefore
also the sign of life, and one for bulk data.
"""

from __future__ import annotations

import errno
import json
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from pathlib import Path, PurePosixPath
from typing import IO, Any

from paceline.network.secure.channel import Channel, ProtocolError, plain
from paceline.processes.memory.byte_ranges import WritableRanges
from paceline.processes.memory.segment import Segment


class NodeMessage(IntEnum):
    """The kinds of messages: over the first connection, and over the second."""

    JOIN, WELCOME, REFUSE, BOARD, START, KILL, DIED, SAID, READY, ALARM, LEAVES, BYE = range(1, 13)
    BULK, LAYOUT, PIECES, FILE, AFTER, TAKEN = range(32, 38)


PROTOCOL = 2
CHUNK = 4 << 20  # bytes of memory or of a file in one message
AHEAD = 32 << 20  # bytes that are handed to a connection before it has sent them
LARGEST_FILE = 64 << 30
_SMALL, _TEXT = 1 << 16, 1 << 23
LIMITS: dict[int, int] = {
    **dict.fromkeys(NodeMessage, _SMALL),
    **dict.fromkeys((NodeMessage.WELCOME, NodeMessage.SAID, NodeMessage.LAYOUT), _TEXT),
    NodeMessage.BOARD: 1 << 26,
    NodeMessage.AFTER: 1 << 20,
    NodeMessage.PIECES: CHUNK + (1 << 16),
    NodeMessage.FILE: CHUNK + (1 << 14),
}
_PIECE, _LENGTH = struct.Struct("<qq"), struct.Struct("<I")

Chunks = Iterator[tuple[int, tuple[bytes | memoryview, ...]]]


class Bulk:
    """One side's end of the second connection: data to send is queued here."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._waiting: deque[Chunks] = deque()
        self.sent, self.taken = 0, 0  # batches sent, and those that the other side has received

    def fileno(self) -> int:
        return self.channel.fileno()

    def give(self, *parts: Chunks) -> None:
        """Send a batch; the other side answers when it has received it."""
        self._waiting.extend(parts)
        self._waiting.append(iter([(NodeMessage.TAKEN, (_LENGTH.pack(0),))]))
        self.sent += 1

    @property
    def busy(self) -> bool:
        """Whether the other side has not received everything yet."""
        return self.sent != self.taken

    @property
    def pending(self) -> bool:
        return bool(self._waiting) or self.channel.pending > 0

    def feed(self) -> None:
        """Send as much as the connection takes."""
        self.channel.flush()
        while self._waiting and self.channel.pending < AHEAD:
            chunk = next(self._waiting[0], None)
            if chunk is None:
                self._waiting.popleft()
                continue
            kind, parts = chunk
            self.channel.send(kind, *parts)

    def acknowledge(self, payload: bytes | bytearray) -> None:
        """Read a TAKEN: the other side has received a batch, or it has sent one, which is answered."""
        if len(payload) != _LENGTH.size:
            raise ProtocolError("a word of another length")
        if _LENGTH.unpack(payload)[0]:
            self.taken += 1
        else:
            self.channel.send(NodeMessage.TAKEN, _LENGTH.pack(1))


def layout(text: bytes, size: int) -> Chunks:
    """The layout of the state's memory."""
    yield NodeMessage.LAYOUT, (json.dumps({"size": size, "text": text.decode()}).encode(),)


def pieces(chosen: Iterable[tuple[int, memoryview]]) -> Chunks:
    """Bytes, and their offsets in the memory of the other node."""
    for offset, data in chosen:
        for at in range(0, len(data), CHUNK):
            part = data[at : at + CHUNK]
            yield NodeMessage.PIECES, (_PIECE.pack(offset + at, len(part)), part)


def write_piece(payload: bytearray, segment: Segment, areas: WritableRanges | None) -> None:
    """Receive what `pieces` sends. `areas`: where the sender may write; None: anywhere."""
    if len(payload) < _PIECE.size:
        raise ProtocolError("a piece without an address")
    offset, size = _PIECE.unpack_from(payload)
    if size != len(payload) - _PIECE.size or offset < 0 or offset + size > segment.size:
        raise ProtocolError("a piece beyond the memory")
    if areas is not None and (offset, size) not in areas:
        raise ProtocolError("a piece of memory that is not the sender's to write")
    segment.memory[offset : offset + size] = memoryview(payload)[_PIECE.size :]


def after(number: int, value: int) -> Chunks:
    """A word of the board that is true once everything sent before has arrived."""
    yield NodeMessage.AFTER, (_PIECE.pack(number, value),)


def files(root: Path, chosen: Iterable[Path]) -> Chunks:
    """Files below a directory, as they are now."""
    for path in chosen:
        name = path.relative_to(root).as_posix()
        try:
            with path.open("rb") as source:
                at = 0
                while True:
                    data = source.read(CHUNK)
                    about = json.dumps({"name": name, "at": at, "last": len(data) < CHUNK}).encode()
                    yield NodeMessage.FILE, (_LENGTH.pack(len(about)) + about, data)
                    at += len(data)
                    if len(data) < CHUNK:
                        break
        except OSError:
            continue  # it has been removed in the meantime


class Inbox:
    """Files that another node sends: renamed when complete. `allowed`: the folders that they may be in."""

    def __init__(self, root: Path, allowed: tuple[str, ...], log: Callable[[str], None]) -> None:
        self._root, self._allowed, self._log = root, allowed, log

    def take(self, payload: bytearray) -> None:
        if len(payload) < _LENGTH.size:
            raise ProtocolError("a file without a name")
        (length,) = _LENGTH.unpack_from(payload)
        about = plain(payload[_LENGTH.size : _LENGTH.size + length])
        data = memoryview(payload)[_LENGTH.size + length :]
        name, at, last = self._checked(about)
        target = self._root / name
        aside = target.with_name(target.name + ".part")
        try:
            self._refuse_links(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            with _own(aside, "r+b" if at else "wb") as file:
                if file.seek(0, os.SEEK_END) < at:
                    raise OSError(errno.EIO, "what comes before this part of it is missing")
                file.seek(at)
                file.write(data)
            if last:
                self._finish(aside, target)
        except OSError as error:
            self._log(f"{name} could not be written: {error.strerror}")

    def _refuse_links(self, name: PurePosixPath) -> None:
        """Another node must not write through a link in the run directory."""
        for folder in name.parents:
            if (self._root / folder).is_symlink() and folder.parts:
                raise OSError(errno.ELOOP, f"{folder} is a symbolic link")

    def _finish(self, aside: Path, target: Path) -> None:
        """Logs of a role's processes are appended; any other file replaces the older one."""
        if target.parent.name == "logs" and target.exists():
            with _own(target, "ab") as whole:
                whole.write(aside.read_bytes())
            aside.unlink()
        else:
            aside.replace(target)

    def _checked(self, about: Any) -> tuple[PurePosixPath, int, bool]:
        match about:
            case {"name": str(name), "at": int(at), "last": bool(last)}:
                path = PurePosixPath(name)
                inside = not path.is_absolute() and ".." not in path.parts and len(path.parts) > 1
                named = inside and path.parts[0] in self._allowed and len(name) < 512 and name.isprintable()
                if named and 0 <= at < LARGEST_FILE:
                    return path, at, last
        raise ProtocolError("a file with a name that is not allowed")


def _own(path: Path, mode: str) -> IO[bytes]:
    """Open a file; a symbolic link is refused."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))
