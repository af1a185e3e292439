"""Messages over an admitted connection: control traffic and bulk data. Only `wait`, `flush` and `part` wait.

A message is a header (kind, flags, length) and a payload of that length. The receiver knows the kinds and the limit of
each, and allocates memory only after it has checked the header.
"""

from __future__ import annotations

import json
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from paceline.errors import PacelineError
from paceline.network.secure.outbound import WOULD_BLOCK, OutboundQueue
from paceline.network.secure.tls import cause

HEADER = struct.Struct("<HHQ")  # kind, flags (0), length of the payload
MOST_PENDING = 1 << 30  # bytes
DEEPEST = 64  # lists and objects inside each other
LARGEST_JSON = 64 << 20  # bytes

# bytes that are read at a time where messages are small; more than a record of TLS has (16 KiB), so that nothing which
# is decrypted already stays behind, where no descriptor shows it
_BUFFER = 1 << 16
_SHARE = 1 << 20  # bytes of one `receive`, about: a peer that sends without end must not starve the others
_SMALL = 1 << 12  # parts up to this size are copied together: that is cheaper than one more entry

Messages = list[tuple[int, bytearray]]  # kind and payload of each
Room = Callable[[int, int], memoryview | None]


class Closed(PacelineError):
    """The other side is gone, or this side has closed the channel."""


class ProtocolError(PacelineError):
    """What came in is no message of this protocol, or the other side does not take what it is sent."""


class Channel:
    """For one thread at a time. `limits`: the kinds of messages that may come in, and the most bytes of each. `room`:
    gives the memory in which a message of a kind and length is received; None: new memory. A message that was received
    there is given with an empty payload."""

    def __init__(
        self,
        connection: socket.socket,
        *,
        limits: Mapping[int, int],
        most_pending: int = MOST_PENDING,
        room: Room | None = None,
    ) -> None:
        connection.setblocking(False)
        self._connection, self._limits, self._most_pending, self._room = connection, limits, most_pending, room
        self._out = OutboundQueue(connection)
        self._lost: str | None = None  # why nothing can be sent any more
        self._buffer = memoryview(bytearray(_BUFFER))
        self._header = bytearray()  # the part of one that is there
        self._kind = 0
        self._payload = bytearray()  # of the message that is coming in,
        self._into: memoryview | None = None  # where its bytes go; None: none is coming in
        self._filled = 0

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def pending(self) -> int:
        """Bytes that have not been sent yet."""
        return self._out.pending

    def close(self) -> None:
        """Close at once: pending messages are dropped; `flush` first if they matter."""
        self._lose("this side has closed the channel")
        self._into = self._room = None  # the owner of `room` has this channel: no reference cycle
        self._connection.close()

    def wait(self, seconds: float, events: int = select.POLLIN) -> bool:
        """Wait until the connection is readable, or has other events; False after `seconds`."""
        poll = select.poll()
        poll.register(self._connection, events)
        return bool(poll.poll(seconds * 1000))

    def part(self, timeout: float) -> None:
        """Shut down sending, and wait until the other side has received everything and closes; drop what it sends."""
        until = time.monotonic() + timeout
        try:
            self._connection.shutdown(socket.SHUT_WR)
            while (left := until - time.monotonic()) > 0:
                if self.wait(left) and not self._connection.recv(_BUFFER):
                    return
        except (OSError, ValueError):  # it has gone already
            return

    # sending

    def send(self, kind: int, *parts: bytes | bytearray | memoryview) -> None:
        """Send, or queue what the connection does not take now. Parts must not change before `pending` is 0."""
        if self._lost is not None:
            raise Closed(self._lost)
        views = [view.cast("B") for part in parts if (view := memoryview(part)).nbytes]
        length = sum(view.nbytes for view in views)
        small = bytearray(HEADER.pack(kind, 0, length))
        for view in views:
            if view.nbytes <= _SMALL:
                small += view
            else:
                if small:
                    self._out.add(memoryview(small), 0, len(small))
                self._out.add(view, 0, view.nbytes)
                small = bytearray()
        if small:
            self._out.add(memoryview(small), 0, len(small))
        self._push()
        if (waiting := self._out.pending) > self._most_pending:
            self.close()
            allowed = f"{waiting:,} bytes wait, {self._most_pending:,} are allowed"
            raise ProtocolError(f"the other side does not take what it is sent: {allowed}")

    def send_json(self, kind: int, value: Any) -> None:
        self.send(kind, json.dumps(value, separators=(",", ":")).encode())

    def flush(self, timeout: float = 0.0) -> bool:
        """Send what is pending, for at most `timeout` seconds. True: everything is sent."""
        until = time.monotonic() + timeout
        while True:
            if self._lost is not None:
                raise Closed(self._lost)
            self._push()
            if not self._out.pending:
                return True
            if (left := until - time.monotonic()) <= 0:
                return False
            self.wait(left, select.POLLOUT)

    def _push(self) -> None:
        try:
            self._out.push()
        except (OSError, ValueError) as error:
            # messages of the other side may still be there to be read
            self._lose(f"the connection is broken: {cause(error)}")
            raise Closed(str(self._lost)) from error

    def _lose(self, why: str) -> None:
        self._lost = self._lost or why
        self._out.clear()

    # receiving

    def receive(self) -> Messages:
        """The complete messages that have arrived, (kind, payload) each; of a flood, the first part. Closed: the other
        side has closed, and all its messages have been given. ProtocolError: bytes that are no message, which close the
        channel."""
        found: Messages = []
        share = _SHARE
        while share > 0:
            into = self._into
            try:
                if into is not None and into.nbytes - self._filled >= _BUFFER:
                    count = self._connection.recv_into(into[self._filled : self._filled + _SHARE])
                    self._filled += count
                else:
                    count = self._connection.recv_into(self._buffer)
                    self._take(count, found)
            except WOULD_BLOCK:
                break
            except ssl.SSLError as error:
                self.close()
                raise ProtocolError(f"what came in is not TLS of this connection: {cause(error)}") from error
            except (OSError, ValueError) as error:
                return self._ended(found, f"the connection is broken: {cause(error)}", error)
            if not count:
                inside = self._header or self._into is not None
                return self._ended(found, f"the other side has closed{' inside a message' if inside else ''}", None)
            share -= count
            if self._into is not None and self._filled == self._into.nbytes:
                self._complete(found)
        return found

    def _ended(self, found: Messages, why: str, error: Exception | None) -> Messages:
        if not found:
            raise Closed(self._lost or why) from error
        return found  # the next call comes here again

    def _take(self, count: int, found: Messages) -> None:
        """Cut what is in the buffer into messages."""
        at = 0
        while at < count:
            if self._into is None:
                piece = self._buffer[at : min(count, at + HEADER.size - len(self._header))]
                self._header += piece
                at += piece.nbytes
                if len(self._header) < HEADER.size:
                    return
                self._begin()
            if self._into is not None:
                piece = self._buffer[at : min(count, at + self._into.nbytes - self._filled)]
                self._into[self._filled : self._filled + piece.nbytes] = piece
                self._filled += piece.nbytes
                at += piece.nbytes
                if self._filled == self._into.nbytes:
                    self._complete(found)

    def _begin(self) -> None:
        kind, flags, length = HEADER.unpack(self._header)
        most = self._limits.get(kind)
        if most is None or flags or length > most:
            self.close()
            if most is None:
                known = ", ".join(_name(one) for one in sorted(self._limits))
                raise ProtocolError(f"a message of kind {kind} came in; known are {known}")
            name = next(_name(one) for one in self._limits if one == kind)
            if flags:
                raise ProtocolError(f"a message of kind {name} has unknown flags ({flags:#x})")
            raise ProtocolError(f"a message of kind {name} claims {length:,} bytes; {most:,} are allowed")
        self._header.clear()
        into = None if self._room is None else self._room(kind, length)
        self._kind, self._payload, self._filled = kind, bytearray(length if into is None else 0), 0
        self._into = memoryview(self._payload) if into is None else into

    def _complete(self, found: Messages) -> None:
        self._into = None
        found.append((self._kind, self._payload))


def plain(payload: bytes | bytearray | memoryview) -> Any:
    """The value of a payload of JSON."""
    data = bytes(payload)
    if len(data) > LARGEST_JSON:
        raise ProtocolError(f"{len(data):,} bytes of JSON came in; {LARGEST_JSON:,} are allowed")
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a message that should be JSON is not: {type(error).__name__}") from None
    if data.count(b"[") + data.count(b"{") > DEEPEST:
        _refuse_depth(value)
    return value


def _refuse_depth(value: Any) -> None:
    """Level by level, without recursion, which later users of the value may need."""
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [one for one in level if isinstance(one, dict | list)]
        if not level:
            return
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    raise ProtocolError(f"a message of JSON has more than {DEEPEST} lists and objects inside each other")


def _name(kind: int) -> str:
    return kind.name if isinstance(kind, Enum) else str(kind)
