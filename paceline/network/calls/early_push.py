"""A gradient that is sent to servers of other nodes while the rest of it is computed.

Its parts are received where the gradient belongs in the server's memory, and mean nothing there until a call names that
place. If the gradient is written to after a part was sent, or the connection has been replaced, the call brings all of
it.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.network.calls.tcp_connection import TcpConnection
from paceline.processes.memory.byte_ranges import Piece, Pieces, ShardRange
from paceline.state import Vector

CHUNK = 1 << 20  # bytes that are sent at a time, at least
SMALLEST = 2 << 20  # bytes of a gradient for which this is worth while

Send = Callable[[int, TcpConnection, Pieces], None]  # to a server, by a connection


class EarlyPush:
    """A gradient at an offset of shared memory, while it is computed. `ways`: by server, the connection and the range
    of the vector that this server holds."""

    def __init__(self, v: Vector, offset: int, ways: dict[int, tuple[TcpConnection, ShardRange]], send: Send) -> None:
        self._v, self.offset, self._ways, self._send = v, offset, ways, send
        self._sent = {shard: cutting.high for shard, (_, cutting) in ways.items()}  # from which index on
        self._version: int | None = v._version
        self._complete = False

    def final(self, index: int, version: int) -> None:
        """See Task.follow."""
        self._version = version if index >= 0 and self._version is not None else None
        self._complete = not index
        if index <= 0:  # the rest goes with the call
            return
        width = self._v.element_size()
        for shard, (wire, cutting) in self._ways.items():
            low, high = max(index, cutting.low), self._sent[shard]
            if (high - low) * width >= CHUNK or low == cutting.low < high:
                self._sent[shard] = low
                self._send(shard, wire, [(self.offset + low * width, (high - low) * width)])

    @property
    def valid(self) -> bool:
        """Whether what was sent is what the gradient is now."""
        return self._complete and self._v._version == self._version

    def rest(self, shard: int, wire: TcpConnection, pieces: Pieces) -> Pieces:
        """The pieces of a call that the server does not have yet."""
        if shard not in self._ways or self._ways[shard][0] is not wire:
            return pieces
        cutting, width = self._ways[shard][1], self._v.element_size()
        start, size = self.offset + cutting.low * width, (cutting.high - cutting.low) * width
        left = (self._sent[shard] - cutting.low) * width
        found: list[Piece] = [(start, left) if piece == (start, size) else piece for piece in pieces]
        return [piece for piece in found if piece[1]]
