"""Calls and answers over a socket, from one node's memory straight into another's.

Both nodes have laid out their memory alike, so a message says which pieces of it follow, and its bytes are received
where they belong: nothing is copied on the way. What a peer may write is bounded before a byte of it is taken.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import threading
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from paceline.memory import Segment
from paceline.net.channel import Closed, ProtocolError
from paceline.wire import MOST

HELLO, WELCOME, POST, REPLY, AGAIN, ORDER = range(1, 7)
HEAD = struct.Struct("<HHIqqqII")  # kind, 0, lane, number, value, more, words, pieces
PIECE = 16  # bytes: offset and size
PIECES = 4096  # of one message
BUFFERS = 64  # handed to the kernel at once
Pieces = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Message:
    """One whole message; its pieces lie in memory already."""

    kind: int
    lane: int = 0
    number: int = 0
    value: int = 0
    more: int = 0
    words: array[int] = field(default_factory=lambda: array("q"))


class Areas:
    """Where a peer may write."""

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        self._spans = sorted((start, start + size) for start, size in spans)
        self._starts = [start for start, _ in self._spans]

    def __contains__(self, piece: tuple[int, int]) -> bool:
        offset, size = piece
        at = bisect_right(self._starts, offset) - 1
        return at >= 0 and size >= 0 and offset + size <= self._spans[at][1]


class Wire:
    """One connection. Nothing here waits: `push` and `pull` do what can be done now."""

    def __init__(self, connection: socket.socket, segment: Segment, areas: Areas) -> None:
        self.connection, self.areas = connection, areas
        connection.setblocking(False)
        self._secure = isinstance(connection, ssl.SSLSocket)
        self._memory = memoryview(segment.memory)
        self._out: deque[memoryview] = deque()
        self._head, self._meta = bytearray(HEAD.size), bytearray()
        self._pieces: deque[tuple[int, int]] = deque()
        self._fields: tuple[int, ...] | None = None
        self._into = memoryview(self._head)
        self.lock = threading.RLock()  # a courier may be at it while its worker computes
        self.peer = -1  # who is at the other end, once it has said so
        self.port = 0  # that it was reached at

    def fileno(self) -> int:
        return self.connection.fileno()

    @property
    def pending(self) -> bool:
        return bool(self._out)

    @property
    def events(self) -> int:
        """What to wait for."""
        return select.POLLIN | select.POLLOUT if self._out else select.POLLIN

    def send(self, message: Message, pieces: Pieces = (), data: Sequence[memoryview] | None = None) -> None:
        """Say something, and as much of the memory as belongs to it, which must stay as it is until it has gone.
        `data`: what the other is to have there, if it is not what lies here."""
        about = array("q", [number for piece in pieces for number in piece])
        head = HEAD.pack(
            message.kind, 0, message.lane, message.number, message.value, message.more, len(message.words), len(pieces)
        )
        with self.lock:
            self._out.append(memoryview(head + message.words.tobytes() + about.tobytes()))
            if data is None:
                data = [self._memory[offset : offset + size] for offset, size in pieces if size]
            self._out.extend(data)
            self.push()

    def push(self) -> bool:
        """Send as much as goes now; True when all has gone."""
        with self.lock:
            while self._out:
                try:
                    sent = self._sent()
                except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                    return False
                except OSError as error:
                    raise Closed(str(error)) from error
                while sent:
                    first = self._out[0]
                    if sent < len(first):
                        self._out[0] = first[sent:]
                        break
                    sent -= len(first)
                    self._out.popleft()
            return True

    def _sent(self) -> int:
        if self._secure:
            return self.connection.send(self._out[0][: 1 << 20])
        return self.connection.sendmsg([self._out[k] for k in range(min(len(self._out), BUFFERS))])

    def pull(self, take: Callable[[Message], None]) -> None:
        """Receive what is there; `take` gets each whole message. A plain connection gives one at a time: whoever waits
        for several hears of the next at once."""
        with self.lock:
            while True:
                try:
                    count = self.connection.recv_into(self._into)
                except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    return
                except OSError as error:
                    raise Closed(str(error)) from error
                if not count:
                    raise Closed("the other end has closed")
                self._into = self._into[count:]
                if not len(self._into) and (message := self._filled()) is not None:
                    take(message)
                    if not self._secure:
                        return

    def _filled(self) -> Message | None:
        """A part is whole: go on to the next, or give the message."""
        if self._fields is None:
            self._fields = HEAD.unpack(self._head)
            kind, zero, *_, words, pieces = self._fields
            if zero or not HELLO <= kind <= ORDER or words > MOST + 32 or pieces > PIECES:
                raise ProtocolError(f"a message of kind {kind} with {words} words and {pieces} pieces")
            self._meta = bytearray(8 * words + PIECE * pieces)
            self._into = memoryview(self._meta)
            if self._meta:
                return None
        elif len(self._meta) and not self._pieces and self._fields[-1]:
            numbers = array("q", bytes(self._meta[8 * self._fields[-2] :]))
            self._pieces.extend(zip(numbers[::2], numbers[1::2], strict=True))
            if any(piece not in self.areas for piece in self._pieces):
                raise ProtocolError("a piece of memory that is not the sender's to write")
            self._fields = (*self._fields[:-1], 0)
        while self._pieces:
            offset, size = self._pieces.popleft()
            if size:
                self._into = self._memory[offset : offset + size]
                return None
        kind, _, lane, number, value, more, words, _ = self._fields
        found = Message(kind, lane, number, value, more, array("q", bytes(self._meta[: 8 * words])))
        self._fields, self._into = None, memoryview(self._head)
        return found

    def close(self) -> None:
        self._out.clear()
        self.connection.close()
