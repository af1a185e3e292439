"""Calls and replies over a TCP connection, from the memory of one node straight into that of another.

Both nodes have laid out their memory alike: a message names pieces of it, and their bytes are received in place,
without a copy. Where a peer may write is checked before a byte is received.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from paceline.network.secure.channel import Closed, ProtocolError
from paceline.network.secure.outbound import WOULD_BLOCK, OutboundQueue, Range
from paceline.processes.memory.byte_ranges import Piece, Pieces, WritableRanges
from paceline.processes.memory.call_codec import MOST
from paceline.processes.memory.segment import Segment


class CallMessage(IntEnum):
    """The kinds of messages."""

    HELLO, WELCOME, POST, REPLY, AGAIN, ORDER, EARLY = range(1, 8)


HELLO, WELCOME, POST, REPLY, AGAIN, ORDER, EARLY = CallMessage  # by themselves: looking up a member takes longer
HEAD = struct.Struct("<HHIqqqII")  # kind, 0, mailbox, number, value, more, words, pieces
PIECE = 16  # bytes: offset and size
PIECES = 4096  # of one message
FRONT = 1024  # bytes that are asked for when a message may begin
KNOWN = 64  # lists of pieces whose checks are remembered


class Message(NamedTuple):
    """One complete message; its pieces are in memory already."""

    kind: int
    mailbox: int = 0
    number: int = 0
    value: int = 0
    more: int = 0
    words: array[int] = array("q")

    @property
    def name(self) -> str:
        return CallMessage(self.kind).name


Take = Callable[[Message], None]
Look = Callable[[Message, Pieces], Sequence[memoryview] | None]


class TcpConnection:
    """One connection. Nothing here waits: `push` and `pull` do what can be done now."""

    def __init__(self, connection: socket.socket, segment: Segment, areas: WritableRanges, port: int = 0) -> None:
        self.connection, self.port = connection, port  # `port`: that it was reached at
        self.allow(areas)
        connection.setblocking(False)
        self._secure = isinstance(connection, ssl.SSLSocket)
        self._memory = memoryview(segment.memory)
        self._out = OutboundQueue(connection)
        self._front = bytearray(FRONT)  # heads and words, and the bytes that came with them
        self._begin = self._end = 0  # of the bytes in it that have not been parsed
        self._message: Message | None = None  # whose pieces are coming,
        self._into: deque[memoryview] = deque()  # and where they go
        self.elsewhere = False  # they go where `look` has chosen
        self.lock = threading.RLock()  # a BackgroundSender may use it while the worker computes
        self.watched = select.POLLIN  # the events that are polled for
        self.peer = -1  # the rank or server at the other end, after its HELLO

    def fileno(self) -> int:
        return self.connection.fileno()

    def allow(self, areas: WritableRanges) -> None:
        """Let the peer write there, and nowhere else."""
        self.areas = areas
        # by the words of a message: pieces that have been checked, and their memory; most messages name the same ones
        self._known: dict[bytes, tuple[Pieces, list[memoryview]]] = {}

    @property
    def pending(self) -> bool:
        return self._out.pending > 0

    @property
    def events(self) -> int:
        """The events to poll for."""
        return select.POLLIN | select.POLLOUT if self._out.pending else select.POLLIN

    def send(self, message: Message, pieces: Pieces = (), data: Sequence[memoryview | Piece] | None = None) -> None:
        """Send a message and the pieces of memory that belong to it, which must not change until they are sent.
        `data`: bytes, or other pieces, to send instead of the memory at those offsets."""
        kind, mailbox, number, value, more, words = message
        head = HEAD.pack(kind, 0, mailbox, number, value, more, len(words), len(pieces)) + words.tobytes()
        if pieces:
            head += array("q", [number for piece in pieces for number in piece]).tobytes()
        ranges: list[Range] = [(memoryview(head), 0, len(head), mailbox)]
        for one in pieces if data is None else data:
            buffer, start, size = (one, 0, len(one)) if isinstance(one, memoryview) else (self._memory, *one)
            if size:
                ranges.append((buffer, start, start + size, mailbox))
        with self.lock:
            try:
                self._out.send(ranges)
            except OSError as error:
                raise Closed(str(error)) from error

    def move(self, mailbox: int, place: int, size: int, to: int) -> None:
        """The bytes of a mailbox's message that were to be sent from one place in memory are at another one now."""
        with self.lock:
            self._out.move(self._memory, mailbox, place, size, to)

    def push(self) -> None:
        """Send as much as goes now."""
        with self.lock:
            try:
                self._out.push()
            except OSError as error:
                raise Closed(str(error)) from error

    def pull(self, take: Take, look: Look | None = None) -> None:
        """Send what is pending, and receive what has arrived. `look` gets each message before its pieces are received,
        and may refuse it, or choose where they go; `take` gets the complete message. Without TLS no more than one
        message is received: poll tells of the next."""
        with self.lock:
            if self._out.pending:
                self.push()
            while self._message is not None or self._heard(look):
                while self._into:
                    into = self._into[0]
                    count = self._poured(into) if self._begin < self._end else self._receive(into)
                    if not count:
                        return
                    if count == len(into):
                        self._into.popleft()
                    else:
                        self._into[0] = into[count:]
                message, self._message = self._message, None
                assert message is not None
                take(message)
                if self._begin == self._end and not self._secure:
                    return

    def _receive(self, into: memoryview) -> int:
        """The number of bytes received; 0: none now."""
        try:
            count = self.connection.recv_into(into)
        except WOULD_BLOCK:
            return 0
        except OSError as error:
            raise Closed(str(error)) from error
        if not count:
            raise Closed("the other end has closed")
        return count

    def _poured(self, into: memoryview) -> int:
        """The number of bytes of a piece that had arrived with the head of its message."""
        count = min(len(into), self._end - self._begin)
        into[:count] = self._front[self._begin : self._begin + count]
        self._begin += count
        return count

    def _heard(self, look: Look | None) -> bool:
        """Whether a message has arrived except for its pieces, which are received next."""
        need = HEAD.size
        while True:
            if self._end - self._begin < need:
                self._make_room(need)
                count = self._receive(memoryview(self._front)[self._end :])
                if not count:
                    return False
                self._end += count
                continue
            kind, zero, mailbox, number, value, more, words, pieces = HEAD.unpack_from(self._front, self._begin)
            if zero or not HELLO <= kind <= EARLY or words > MOST + 32 or pieces > PIECES:
                raise ProtocolError(f"a message of kind {kind} with {words} words and {pieces} pieces")
            whole = HEAD.size + 8 * words + PIECE * pieces
            if self._end - self._begin >= whole:
                break
            need = whole
        begin = self._begin + HEAD.size
        middle, self._begin = begin + 8 * words, self._begin + whole
        message = Message(kind, mailbox, number, value, more, array("q", self._front[begin:middle]))
        places, memory = self._places(bytes(self._front[middle : self._begin])) if pieces else ((), [])
        given = None if look is None else look(message, places)
        self.elsewhere = given is not None
        self._message = message
        self._into.extend(memory if given is None else filter(len, given))
        return True

    def _places(self, named: bytes) -> tuple[Pieces, list[memoryview]]:
        """The pieces that a message names, and their memory, once they are known to be the peer's to write."""
        if (found := self._known.get(named)) is None:
            numbers = array("q", named)
            places = list(zip(numbers[::2], numbers[1::2], strict=True))
            if any(place not in self.areas for place in places):
                raise ProtocolError("a piece of memory that is not the sender's to write")
            if len(self._known) >= KNOWN:
                self._known.clear()
            found = self._known[named] = places, [self._memory[at : at + size] for at, size in places if size]
        return found

    def _make_room(self, need: int) -> None:
        """Make room for `need` bytes that have not been parsed."""
        if self._begin == self._end:
            self._begin = self._end = 0
        size = max(need, FRONT)
        if self._begin + need > len(self._front) or (len(self._front) > size and not self._end):
            rest = self._front[self._begin : self._end]
            self._front = rest + bytearray(max(size, len(rest)) - len(rest))
            self._begin, self._end = 0, len(rest)

    def close(self) -> None:
        self._out.clear()
        self.connection.close()
