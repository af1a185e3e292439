"""Bytes that wait to be sent over a connection that never blocks, with TLS or without."""

from __future__ import annotations

import socket
import ssl
from collections import deque
from contextlib import suppress
from itertools import islice

WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_ENTRIES = 64  # ranges of one sendmsg
_TLS_PIECE = 1 << 18  # bytes of one write to TLS

Range = tuple[memoryview, int, int, int]  # buffer, start, end, owner


class OutboundQueue:
    """Ranges of buffers in the order in which they are sent. A buffer must not change while it is in the queue."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._tls = isinstance(connection, ssl.SSLSocket)
        self._ranges: deque[Range] = deque()
        self.pending = 0  # bytes

    def add(self, buffer: memoryview, start: int, end: int, owner: int = 0) -> None:
        self._ranges.append((buffer, start, end, owner))
        self.pending += end - start

    def send(self, ranges: list[Range]) -> None:
        """Send what the connection takes now, and queue the rest. OSError or ValueError: it is broken."""
        sent = 0
        if not self._ranges and not self._tls and len(ranges) <= _ENTRIES:
            views = [buffer[start:end] for buffer, start, end, _ in ranges]
            with suppress(BlockingIOError):
                sent = self._connection.sendmsg(views)
                if sent == sum(map(len, views)):
                    return
        for buffer, start, end, owner in ranges:
            passed = min(sent, end - start)
            sent -= passed
            if start + passed < end:
                self.add(buffer, start + passed, end, owner)
        self.push()

    def push(self) -> None:
        """Send what the connection takes now. OSError or ValueError: it is broken."""
        ranges = self._ranges
        while ranges:
            try:
                if self._tls:
                    # what TLS has begun to write must be offered again with the same length
                    buffer, start, end, _ = ranges[0]
                    sent = self._connection.send(buffer[start : min(end, start + _TLS_PIECE)])
                else:
                    views = [buffer[start:end] for buffer, start, end, _ in islice(ranges, _ENTRIES)]
                    sent = self._connection.sendmsg(views)
            except WOULD_BLOCK:
                return
            self.pending -= sent
            while sent:
                buffer, start, end, owner = ranges.popleft()
                if sent < end - start:
                    ranges.appendleft((buffer, start + sent, end, owner))
                    break
                sent -= end - start

    def move(self, buffer: memoryview, owner: int, place: int, size: int, to: int) -> None:
        """The bytes of an owner that were in a range of a buffer have been copied to another place in it."""
        for at, (of, start, end, one) in enumerate(self._ranges):
            if of is buffer and one == owner and place <= start < place + size:
                self._ranges[at] = (of, start - place + to, end - place + to, one)

    def clear(self) -> None:
        self._ranges.clear()
        self.pending = 0
