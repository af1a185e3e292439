"""The connection to one other worker, for meetings among some: the kinds of messages, and how each is received.

Vectors and cells are received where they belong, without a copy between. A vector follows its offer directly.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

from paceline.network.means import mean_rooms
from paceline.network.means.mean_rooms import slices
from paceline.network.secure.channel import Channel, ProtocolError
from paceline.processes.memory.packed_words import bytes_of, empty_of, shape_word
from paceline.state import Vector

Lives = frozenset[tuple[int, int]]  # ranks, and which life of each


class Occasion(NamedTuple):
    """Which meeting it is."""

    generation: int  # how often the run had returned to a checkpoint,
    t: int  # and the step
    key: int  # of the workers and the step
    nth: int  # of the meetings with this key


class LinkMessage(IntEnum):
    """The kinds of messages: a worker has come to a meeting; a slice of the vector that it gives; it has the vectors of
    these workers; a slice of the cells that a worker takes over."""

    OFFER, PART, HAVE, CELLS = range(1, 5)


OFFER, PART, HAVE, CELLS = LinkMessage
_OFFER = struct.Struct("<qqqqqdqq")  # the occasion, the number of the meeting for its worker, `number`, shape, given
_HAVE = struct.Struct("<qqqq")  # the occasion; pairs of rank and life follow
_LIFE = struct.Struct("<qq")
MOST_MEMBERS = 1 << 16


@dataclass(frozen=True)
class Have:
    """A worker has the vectors that these give it, and will not count more than these."""

    occasion: Occasion
    lives: Lives

    def packed(self) -> bytes:
        return _HAVE.pack(*self.occasion) + b"".join(_LIFE.pack(*life) for life in sorted(self.lives))

    @classmethod
    def unpacked(cls, data: bytes | bytearray) -> Have:
        if len(data) < _HAVE.size or (len(data) - _HAVE.size) % _LIFE.size:
            raise ProtocolError(f"HAVE with {len(data):,} bytes")
        return cls(Occasion(*_HAVE.unpack_from(data)), frozenset(_LIFE.iter_unpack(data[_HAVE.size :])))


class Offer:
    """What a worker has brought to a meeting; `vector` if it gives it to this one."""

    def __init__(self, head: bytes | bytearray, most: int) -> None:
        """`most`: bytes of a vector."""
        *occasion, self.number, self.told, self.shape, given = _OFFER.unpack(head)
        self.occasion = Occasion(*occasion)
        size = bytes_of(self.shape)
        if size is None or size > most:
            raise ProtocolError(f"a vector of shape {self.shape}; {most:,} bytes are allowed")
        self.vector: Vector | None = empty_of(self.shape, "cpu") if given else None
        self._rooms = deque(() if self.vector is None else slices(self.vector))
        self.missing = len(self._rooms)  # slices that have not come whole

    def room(self, length: int) -> memoryview:
        if not self._rooms or self._rooms[0].nbytes != length:
            raise ProtocolError(f"PART with {length:,} bytes came out of turn")
        return self._rooms.popleft()

    @staticmethod
    def packed(occasion: Occasion, number: int, told: float, v: Vector, *, given: bool) -> bytes:
        return _OFFER.pack(*occasion, number, told, shape_word(v), given)


class PeerLink:
    """One connection. `most`: bytes of the largest vector that may come."""

    def __init__(self, connection: socket.socket, most: int) -> None:
        self._most = most
        part = mean_rooms.SLICE
        limits = {OFFER: _OFFER.size, PART: part, CELLS: part, HAVE: _HAVE.size + MOST_MEMBERS * _LIFE.size}
        self.channel = Channel(
            connection,
            limits={int(kind): most for kind, most in limits.items()},
            most_pending=1 << 62,  # what is sent is not copied, and is no more than the vectors
            room=self._room,
        )
        self._heads: deque[bytearray] = deque()  # of offers that have not been read
        self._coming: deque[Offer] = deque()  # read, to whose slices memory is given
        self._taking: Offer | None = None  # whose slices arrive
        self._cells: deque[memoryview] = deque()  # where cells go
        self.cells_missing = 0

    def bury(self) -> None:
        self.channel.close()

    def offer(self, head: bytes, v: Vector | None) -> None:
        """Say that this worker has come to a meeting, and give its vector."""
        self.channel.send(OFFER, head)
        for part in () if v is None else slices(v):
            self.channel.send(PART, part)

    def have(self, told: Have) -> None:
        self.channel.send(HAVE, told.packed())

    def give_cells(self, cells: Tensor) -> None:
        for part in slices(cells):
            self.channel.send(CELLS, part)

    def expect_cells(self, into: Tensor) -> None:
        self._cells = deque(slices(into))
        self.cells_missing = len(self._cells)

    def exchange(self) -> Iterator[Offer | Have]:
        """Send what is pending, and give what has come whole."""
        if self.channel.pending:
            self.channel.flush()
        for kind, payload in self.channel.receive():
            if kind == HAVE:
                yield Have.unpacked(payload)
            elif kind == CELLS:
                self.cells_missing -= not payload
            else:
                if kind == OFFER:
                    if not self._coming:  # one only: the next may not have come whole
                        self._read_head()
                    self._taking = self._coming.popleft()
                else:
                    assert self._taking is not None
                    self._taking.missing -= 1
                if not self._taking.missing:
                    yield self._taking

    def _room(self, kind: int, length: int) -> memoryview | None:
        """Where a message goes that begins to come in. Cells that this worker does not wait for get new memory."""
        if kind == OFFER:
            if length != _OFFER.size:
                raise ProtocolError(f"OFFER with {length} bytes")
            self._heads.append(bytearray(length))
            return memoryview(self._heads[-1])
        if kind == PART:
            while self._heads:  # all of them have come: messages come one after the other
                self._read_head()
            offer = self._coming[-1] if self._coming else self._taking
            if offer is None:
                raise ProtocolError("PART came before an OFFER")
            return offer.room(length)
        if kind == CELLS and self._cells and self._cells[0].nbytes == length:
            return self._cells.popleft()
        return None

    def _read_head(self) -> None:
        self._coming.append(Offer(self._heads.popleft(), self._most))
