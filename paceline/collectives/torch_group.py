"""Some workers joined by torch.distributed, for vectors of one length: what they send each other for a mean.

No all-reduce of torch's is used: it adds in an order of its own, and our means have the bits of a sum in the order of
the ranks. Everybody sends each other one its slice of the vector, adds up what came in for its own slice, and sends
the result to all: as much traffic as a ring has. Of small vectors everybody gets all and adds up itself.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
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
    """One operation under way. `ring` is called when it is over."""

    def __init__(self, work: Any, ring: Callable[[], None], polled: bool) -> None:
        self._work, self._polled, self._over = work, polled, False
        if not polled:

            def over(_: Any) -> None:
                self._over = True
                ring()

            work.get_future().add_done_callback(over)

    @property
    def over(self) -> bool:
        """Whether it has come to an end, good or bad."""
        return bool(self._work.is_completed()) if self._polled else self._over

    def finish(self) -> None:
        """Of one that is over: Broken if it failed."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise Broken(str(error)) from error


class Group:
    """The workers of one circle. `place`: which of its `size` members this one is."""

    def __init__(
        self, backend: str, store: FarStore, prefix: str, place: int, size: int, address: str, ring: Callable[[], None]
    ) -> None:
        self.place, self.size = place, size
        self._ring, self._polled = ring, backend == "nccl"
        self._store = store  # torch holds it by its C++ half only
        within = PrefixStore(prefix, store)
        self._work: Any = None
        self._backend: Any
        if backend == "nccl":
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = LONGEST
            self._backend = nccl(within, place, size, options)
            self._backend.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
        else:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout, options._threads = CONNECTING, 1
            options._devices = [gloo.create_device(hostname=address)]
            self._backend = gloo(within, place, size, options)
            self._backend._set_default_timeout(LONGEST)
        self._sent: Tensor | None = None

    def start(self, v: Vector, header: Header) -> Exchange:
        """The first half: everybody's vectors, or the slices that this member is to add up."""
        size, item = self.size, v.element_size()
        self.small = v.numel() * item * size <= SMALL
        self._share = -(-v.numel() // size)
        length = v.numel() if self.small else self._share
        row = HEAD + -(-length * item // HEAD) * HEAD
        if self._sent is None:
            rows = 1 if self.small else size
            self._sent = torch.empty((rows, row), dtype=torch.uint8, device=v.device)
            self._came = torch.empty((size, row), dtype=torch.uint8, device=v.device)
            if not self.small:
                self._part = torch.empty(self._share, dtype=v.dtype, device=v.device)
                self._whole = torch.empty(self._share * size, dtype=v.dtype, device=v.device)
        self._sent[:, :HEAD] = header.written().to(v.device)
        data = self._sent[:, HEAD : HEAD + length * item]
        for k in range(len(data)):
            piece = v[k * length : (k + 1) * length]
            data[k, : piece.numel() * item].view(v.dtype).copy_(piece)
        if self.small:
            return self._under_way(self._backend._allgather_base(self._came.view(-1), self._sent.view(-1)))
        return self._under_way(self._backend.alltoall_base(self._came.view(-1), self._sent.view(-1), [], []))

    def headers(self) -> list[Header]:
        """What the others said, in the order of their places; once the first half is over."""
        return [Header.read(row) for row in self._came[:, :HEAD].cpu()]

    def small_mean(self, like: Vector, weights: list[float]) -> Vector:
        result = torch.empty_like(like)
        mean_into(result, self._vectors(like, like.numel()), weights)
        return result

    def start_second(self, like: Vector, weights: list[float]) -> Exchange:
        """The second half: this member's slice of the mean to all others."""
        low = min(self.place * self._share, like.numel())
        high = min(low + self._share, like.numel())
        if high > low:
            mean_into(self._part[: high - low], self._vectors(like, high - low), weights)
        return self._under_way(self._backend._allgather_base(self._whole, self._part))

    def large_mean(self, like: Vector) -> Vector:
        """Not copied: it lies there until the next mean's second half."""
        return self._whole[: like.numel()]

    def broadcast(self, tensor: Tensor, root: int) -> Exchange:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._under_way(self._backend.broadcast([tensor], options))

    def _vectors(self, like: Vector, length: int) -> list[Vector]:
        bytes_ = length * like.element_size()
        return [row[HEAD : HEAD + bytes_].view(like.dtype) for row in self._came]

    def _under_way(self, work: Any) -> Exchange:
        self._work = work
        return Exchange(work, self._ring, self._polled)

    def bury(self) -> None:
        """Let go of it. An operation under way ends when the others let go of it too, which may take a while: that is
        waited for aside, and so is the closing of the connections."""
        backend, work, self._backend, self._work = self._backend, self._work, None, None
        if backend is None:
            return
        if self._polled:
            backend.abort()
        threading.Thread(target=_bury, args=([backend], [work], [self._store]), daemon=True).start()


def _bury(backend: list[Any], work: list[Any], store: list[Any]) -> None:
    try:
        if work[0] is not None:
            work[0].wait()
    except RuntimeError:
        pass
    work.clear()
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
