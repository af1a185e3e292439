"""A group: what its members send each other for a mean, whatever carries the bytes.

No all-reduce of a library is used: it adds in an order of its own, and our means have the bits of a sum in the order of
the ranks. Every member gets all small vectors and adds them up itself. Of large vectors every member gets its slice,
adds the slices up, and sends the result to all: as much traffic as a ring has.
"""

from __future__ import annotations

import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from paceline.errors import RunError, SchemeError
from paceline.network.secure.store_client import StoreClient
from paceline.state import Vector, mean_into

HEAD = 64  # bytes in front of what is sent: a Header

_HEADER = struct.Struct("<qqdqqq")


class Broken(Exception):
    """This group will not complete the mean: a member died, left, or asks for another group."""


@dataclass(frozen=True)
class Header:
    """The numbers that a worker sends with its vector."""

    index: int  # which mean of this circle it is at,
    number: int  # and which of its own
    weight: float
    joiner: int = 0  # 1 + the worker that it knows to wait for being taken in,
    joiner_life: int = 0  # and which life of it
    shape: int = 0  # of its vector: length and type in one number

    def packed(self) -> bytes:
        fields = self.index, self.number, self.weight, self.joiner, self.joiner_life, self.shape
        return _HEADER.pack(*fields).ljust(HEAD, b"\0")

    @classmethod
    def unpacked(cls, data: bytes | bytearray) -> Header:
        return cls(*_HEADER.unpack_from(data))


@dataclass(frozen=True)
class VectorPiece:
    """A part of a large vector, sharded over the members."""

    low: int
    high: int
    share: int  # the length of a slice; the last ones of the last piece may be shorter
    cut: list[int]  # how long each member's slice is
    slices: Tensor  # room for this member's slice of every vector

    def slice_of(self, vector: Tensor, place: int) -> Tensor:
        """A member's slice of a vector."""
        low = self.low + place * self.share
        return vector[low : low + self.cut[place]]


def pieces(v: Vector, size: int, place: int, most: int, *, backwards: bool = False) -> list[VectorPiece]:
    """A vector in pieces of a limited size, all but the last equally long. `backwards`: from its end to its front."""
    step = max(most // v.element_size() // size, 1) * size
    found = []
    for at in range(0, v.numel(), step):
        low, high = at, min(at + step, v.numel())
        if backwards:
            low, high = v.numel() - high, v.numel() - low
        share = -(-(high - low) // size)
        cut = [max(min(share, high - low - k * share), 0) for k in range(size)]
        room = torch.empty((size, cut[place]), dtype=v.dtype, device=v.device)
        found.append(VectorPiece(low, high, share, cut, room))
    return found


class Exchange(ABC):
    """An operation among the members that is under way."""

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether it has come to an end, good or bad."""

    @abstractmethod
    def finish(self) -> None:
        """Of an exchange that is over: Broken if it failed."""


class Group(ABC):
    """Some workers, connected. `place`: which of its `size` members this one is."""

    any_length: ClassVar[bool] = False  # vectors of several lengths may go through the same group
    gathers: ClassVar[bool] = False  # compressed vectors go through it as they are
    small: bool  # whether the mean under way is of small vectors

    def __init__(self, place: int, size: int) -> None:
        self.place, self.size = place, size

    @abstractmethod
    def start(self, v: Vector, header: Header) -> Exchange:
        """The first half: all vectors, or the slices that this member is to add up. v must stay as it is."""

    def gather(self, data: Tensor, header: Header) -> Exchange:
        """Bytes of every member to all others: `rows` has them when it is over. They must stay as they are."""
        raise AssertionError("this group does not gather")

    def open_early(self, v: Vector, header: Header) -> Callable[[int], None] | None:
        """Begin a mean of a vector that is still being computed. Gives a function that is to be told from which index
        on the vector is final; None: not possible here. `commit` follows, or the group is left."""
        return None

    def commit(self, header: Header) -> Exchange:
        """The vector of `open_early` is final, and the worker is at its mean: the first half, as of `start`."""
        raise AssertionError("no mean was begun early: open_early() of this group gives None")

    @abstractmethod
    def headers(self) -> list[Header]:
        """What the members said, in the order of their places; once the first half is over."""

    @abstractmethod
    def rows(self) -> list[Tensor]:
        """The header and the small vector of each member, as bytes, once the first half is over."""

    def small_mean(self, v: Vector, weights: list[float]) -> Vector:
        """The mean of small vectors, of which `v` is this member's, once the first half is over."""
        end = HEAD + v.numel() * v.element_size()
        vectors = [row[HEAD:end].view(v.dtype) for row in self.rows()]
        vectors[self.place] = v.detach()
        result = torch.empty_like(v)
        mean_into(result, vectors, weights)
        return result

    @abstractmethod
    def start_second(self, weights: list[float]) -> Exchange:
        """The second half of large ones: this member's slices of the mean to all others."""

    @abstractmethod
    def large_mean(self, like: Vector) -> Vector:
        """Their mean, not copied: valid until the next mean's second half, which begins when all have this one."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int) -> Exchange:
        """The tensor of one member to all others, into theirs."""

    def start_meeting(self, v: Vector, header: Header, to: Sequence[int], of: Sequence[int]) -> Exchange:
        """Send the header to all members and the vector to those at the places `to`, and receive those of `of`."""
        raise SchemeError("workers do not meet over connections of torch; use --collective tcp")

    def met(self) -> dict[int, Vector]:
        """The vectors of a meeting, by place, once its exchange is over."""
        raise AssertionError("no meeting was begun")

    def confirm(self) -> Exchange:
        """Tell all members that this one has all vectors of a meeting: over when all have said so."""
        raise AssertionError("no meeting was begun")

    @abstractmethod
    def carry_on(self) -> None:
        """The worker computes: the exchange must proceed without it."""

    @abstractmethod
    def bury(self) -> None:
        """Leave the group now, whatever is under way."""


class Left(Protocol):
    """What can be left."""

    def bury(self) -> None: ...


Made = TypeVar("Made", bound=Left)


class GroupBuilder(Generic[Made]):
    """Makes a group in a thread: making it waits for the other members, any of which may die meanwhile. `make` gets
    this builder, which says whether the group is still wanted."""

    def __init__(self, make: Callable[[GroupBuilder[Made]], Made], ring: Callable[[], None]) -> None:
        self._group: Made | None = None
        self._error: Exception | None = None
        self.wanted = True

        def build() -> None:
            try:
                self._group = make(self)
            except Exception as error:
                self._error = error
            if not self.wanted and self._group is not None:
                self._group.bury()
            ring()

        threading.Thread(target=build, daemon=True).start()

    @property
    def over(self) -> bool:
        return self._group is not None or self._error is not None

    def group(self) -> Made:
        if self._group is None:
            raise self._error if isinstance(self._error, RunError) else Broken(str(self._error))
        return self._group

    def give_up(self) -> None:
        self.wanted = False
        if self._group is not None:
            self._group.bury()


@dataclass(frozen=True)
class GroupRequest:
    """A group that is to be made: its members, and its name in the store."""

    store: StoreClient
    name: str
    members: list[int]  # ranks, in the order of their places
    place: int  # of this worker
    device: torch.device
    building: GroupBuilder[Any]
    ring: Callable[[], None]  # wake this worker
    purpose: str = "a mean"  # in errors
