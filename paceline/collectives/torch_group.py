"""Some workers joined by torch.distributed, for vectors of one length: what they send each other for a mean.

No all-reduce of torch's is used: it adds in an order of its own, and our means have the bits of a sum in the order of
the ranks. Everybody sends each other one its slice of the vector, adds up what came in for its own slice, and sends
the result to all: as much traffic as a ring has. Of small vectors everybody gets all and adds up itself.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore

from paceline.net.store import FarStore
from paceline.state import Vector, mean_into

SMALL = 2 << 20  # bytes of all vectors together up to which everybody adds up itself
PIECE = 4 << 20  # bytes of a large vector that go together: Gloo is slow with messages that no cache holds
HEAD = 64  # bytes in front of what is sent: a Header
CONNECTING = timedelta(seconds=5)  # for one connection to one other worker, all of whom have said that they are there
LONGEST = timedelta(minutes=10)  # of one operation; whether somebody is alive is not its business

_HEADER = struct.Struct("<qqdqq")


class Broken(Exception):
    """This group will not bring the mean about: somebody died, went away, or calls for another group."""


@dataclass(frozen=True)
class Header:
    """What a worker says beside its vector."""

    index: int  # which mean of this circle it is at,
    number: int  # and which of its own
    weight: float
    joiner: int = 0  # 1 + the worker that it knows to wait for being taken in,
    joiner_life: int = 0  # and which life of it

    def written(self) -> Tensor:
        text = _HEADER.pack(self.index, self.number, self.weight, self.joiner, self.joiner_life)
        return torch.frombuffer(bytearray(text.ljust(HEAD, b"\0")), dtype=torch.uint8)

    @classmethod
    def read(cls, written: Tensor) -> Header:
        return cls(*_HEADER.unpack_from(bytes(written.tolist())))


class Exchange:
    """Operations under way that belong together. `ring` is called when they are over."""

    def __init__(self, works: Sequence[Any], ring: Callable[[], None], polled: bool) -> None:
        self._works, self._polled = works, polled
        self._ended: list[Any] = []
        if not polled:

            def over(future: Any) -> None:  # in a thread of torch's
                self._ended.append(future)
                if self.over:
                    ring()

            for work in works:
                work.get_future().add_done_callback(over)

    @property
    def over(self) -> bool:
        """Whether they have come to an end, good or bad."""
        if self._polled:
            return all(work.is_completed() for work in self._works)
        return len(self._ended) == len(self._works)

    def finish(self) -> None:
        """Of one that is over: Broken if it failed."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise Broken(str(error)) from error


@dataclass(frozen=True)
class Piece:
    """A part of a large vector, cut among the members."""

    low: int
    high: int
    share: int  # the length of a slice; the last ones of the last piece may be shorter
    cut: list[int]  # how long everybody's slice is
    slices: Tensor  # room for this member's slice of everybody's vector


def _pieces(v: Vector, size: int, place: int) -> list[Piece]:
    step = max(PIECE // v.element_size() // size, 1) * size
    pieces = []
    for low in range(0, v.numel(), step):
        high = min(low + step, v.numel())
        share = -(-(high - low) // size)
        cut = [max(min(share, high - low - k * share), 0) for k in range(size)]
        room = torch.empty((size, cut[place]), dtype=v.dtype, device=v.device)
        pieces.append(Piece(low, high, share, cut, room))
    return pieces


class Group:
    """The workers of one circle. `place`: which of its `size` members this one is."""

    def __init__(
        self,
        backend: str,
        store: FarStore,
        prefix: str,
        place: int,
        size: int,
        *,
        address: str,
        device: torch.device,
        ring: Callable[[], None],
    ) -> None:
        self.place, self.size = place, size
        self._ring, self._polled = ring, backend == "nccl"
        self._store = store  # torch holds it by its C++ half only
        within = PrefixStore(prefix, store)
        self._works: Sequence[Any] = ()
        self._backend: Any
        if backend == "nccl":
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = LONGEST
            self._backend = nccl(within, place, size, options)
            self._backend.eager_connect_single_device(device)
        else:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout, options._threads = CONNECTING, 2
            options._devices = [gloo.create_device(hostname=address)]
            self._backend = gloo(within, place, size, options)
            self._backend._set_default_timeout(LONGEST)
        self._sent: Tensor | None = None
        self._pieces: list[Piece] = []

    def start(self, v: Vector, header: Header) -> Exchange:
        """The first half: everybody's vectors, or the slices that this member is to add up. v must stay as it is."""
        size, length = self.size, v.numel() * v.element_size()
        self.small = length * size <= SMALL
        row = HEAD + (-(-length // HEAD) * HEAD if self.small else 0)
        if self._sent is None:
            self._sent = torch.empty(row, dtype=torch.uint8, device=v.device)
            self._came = torch.empty((size, row), dtype=torch.uint8, device=v.device)
            self._pieces = [] if self.small else _pieces(v, size, self.place)
            self._whole = torch.empty(sum(piece.share * size for piece in self._pieces), dtype=v.dtype, device=v.device)
        self._sent[:HEAD] = header.written().to(v.device)
        if self.small:
            self._sent[HEAD : HEAD + length].view(v.dtype).copy_(v)
        works = [self._backend._allgather_base(self._came.view(-1), self._sent)]
        for piece in self._pieces:
            mine, cut = [piece.slices.shape[1]] * size, piece.cut
            works.append(self._backend.alltoall_base(piece.slices.view(-1), v[piece.low : piece.high], mine, cut))
        return self._under_way(works)

    def headers(self) -> list[Header]:
        """What the others said, in the order of their places; once the first half is over."""
        return [Header.read(row) for row in self._came[:, :HEAD].cpu()]

    def small_mean(self, like: Vector, weights: list[float]) -> Vector:
        end = HEAD + like.numel() * like.element_size()
        result = torch.empty_like(like)
        mean_into(result, [row[HEAD:end].view(like.dtype) for row in self._came], weights)
        return result

    def start_second(self, weights: list[float]) -> Exchange:
        """The second half: this member's slices of the mean to all others."""
        works = []
        for piece in self._pieces:
            there = self._whole[piece.low : piece.low + piece.share * self.size]
            mine = there[self.place * piece.share : (self.place + 1) * piece.share]
            if piece.slices.numel():
                mean_into(mine[: piece.slices.shape[1]], list(piece.slices), weights)
            works.append(self._backend._allgather_base(there, mine))
        return self._under_way(works)

    def large_mean(self, like: Vector) -> Vector:
        """Not copied: it lies there until the next mean's second half, which nobody begins before all have had it."""
        return self._whole[: like.numel()]

    def broadcast(self, tensor: Tensor, root: int) -> Exchange:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._under_way([self._backend.broadcast([tensor], options)])

    def _under_way(self, works: Sequence[Any]) -> Exchange:
        self._works = works
        return Exchange(works, self._ring, self._polled)

    def bury(self) -> None:
        """Let go of it. An operation under way ends when the others let go of it too, which may take a while: that is
        waited for aside, and so is the closing of the connections."""
        backend, works, self._backend, self._works = self._backend, self._works, None, ()
        if backend is None:
            return
        if self._polled:
            backend.abort()
        threading.Thread(target=_bury, args=([backend], [*works], [self._store]), daemon=True).start()


def _bury(backend: list[Any], works: list[Any], store: list[Any]) -> None:
    for work in works:
        with contextlib.suppress(RuntimeError):
            work.wait()
    works.clear()
    backend.clear()  # this waits for torch's threads
    store.clear()


class Building:
    """A group that is being made, aside: who makes one waits inside torch, and somebody may die meanwhile."""

    def __init__(self, make: Callable[[], Group], ring: Callable[[], None]) -> None:
        self._group: Group | None = None
        self._error: Exception | None = None
        self._given_up = False

        def build() -> None:
            try:
                self._group = make()
            except Exception as error:
                self._error = error
            if self._given_up and self._group is not None:
                self._group.bury()
            ring()

        self._thread = threading.Thread(target=build, daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        return self._group is not None or self._error is not None

    def group(self) -> Group:
        if self._group is None:
            raise Broken(str(self._error))
        return self._group

    def give_up(self) -> None:
        self._given_up = True
        if self._group is not None:
            self._group.bury()
