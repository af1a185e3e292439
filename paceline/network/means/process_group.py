"""A group of workers in torch.distributed (Gloo or NCCL), for vectors of one length.

The connections are torch's own: neither authenticated nor encrypted. For networks that are trusted.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore

from paceline.network.means.group import HEAD, Broken, Exchange, Group, GroupRequest, Header, VectorPiece, pieces
from paceline.state import Vector, mean_into

SMALL = 2 << 20  # bytes of all vectors together up to which every member adds them up itself
PIECE = 4 << 20  # bytes of a large vector that go together: Gloo is slow with messages that no cache holds
CONNECTING = timedelta(seconds=5)  # for one connection to one other worker, all of whom have said that they are there
LONGEST = timedelta(minutes=10)  # of one operation; whether members are alive is decided elsewhere


class Operations(Exchange):
    """Operations of torch's that belong together. `ring` is called when they are over."""

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
        if self._polled:
            return all(work.is_completed() for work in self._works)
        return len(self._ended) == len(self._works)

    def finish(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise Broken(str(error)) from error


class TorchGroup(Group):
    """The workers of one circle, as a process group of torch's."""

    def __init__(self, backend: str, request: GroupRequest, address: str) -> None:
        place, size = request.place, len(request.members)
        super().__init__(place, size)
        self._ring, self._polled = request.ring, backend == "nccl"
        self._store = request.store  # torch holds it by its C++ half only
        within = PrefixStore(request.name, request.store)
        self._works: Sequence[Any] = ()
        self._backend: Any
        if backend == "nccl":
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = LONGEST
            self._backend = nccl(within, place, size, options)
            self._backend.eager_connect_single_device(request.device)
        else:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout, options._threads = CONNECTING, 2
            options._devices = [gloo.create_device(hostname=address)]
            self._backend = gloo(within, place, size, options)
            self._backend._set_default_timeout(LONGEST)
        self._sent: Tensor | None = None
        self._pieces: list[VectorPiece] = []

    def start(self, v: Vector, header: Header) -> Exchange:
        size, length = self.size, v.numel() * v.element_size()
        self.small = length * size <= SMALL
        row = HEAD + (-(-length // HEAD) * HEAD if self.small else 0)
        if self._sent is None:
            self._sent = torch.empty(row, dtype=torch.uint8, device=v.device)
            self._came = torch.empty((size, row), dtype=torch.uint8, device=v.device)
            self._pieces = [] if self.small else pieces(v, size, self.place, PIECE)
            self._whole = torch.empty(sum(piece.share * size for piece in self._pieces), dtype=v.dtype, device=v.device)
        self._sent[:HEAD] = torch.frombuffer(bytearray(header.packed()), dtype=torch.uint8).to(v.device)
        if self.small:
            self._sent[HEAD : HEAD + length].view(v.dtype).copy_(v)
        works = [self._backend._allgather_base(self._came.view(-1), self._sent)]
        for piece in self._pieces:
            mine, cut = [piece.slices.shape[1]] * size, piece.cut
            works.append(self._backend.alltoall_base(piece.slices.view(-1), v[piece.low : piece.high], mine, cut))
        return self._under_way(works)

    def headers(self) -> list[Header]:
        return [Header.unpacked(bytes(row.tolist())) for row in self._came[:, :HEAD].cpu()]

    def rows(self) -> list[Tensor]:
        return list(self._came)

    def start_second(self, weights: list[float]) -> Exchange:
        works = []
        for piece in self._pieces:
            there = self._whole[piece.low : piece.low + piece.share * self.size]
            mine = there[self.place * piece.share : (self.place + 1) * piece.share]
            if piece.slices.numel():
                mean_into(mine[: piece.slices.shape[1]], list(piece.slices), weights)
            works.append(self._backend._allgather_base(there, mine))
        return self._under_way(works)

    def large_mean(self, like: Vector) -> Vector:
        return self._whole[: like.numel()]

    def broadcast(self, tensor: Tensor, root: int) -> Exchange:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._under_way([self._backend.broadcast([tensor], options)])

    def carry_on(self) -> None:
        """Torch has threads of its own for it."""

    def _under_way(self, works: Sequence[Any]) -> Exchange:
        self._works = works
        return Operations(works, self._ring, self._polled)

    def bury(self) -> None:
        """Leave the group. A thread waits for operations under way, which end when the others leave too, and closes."""
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
