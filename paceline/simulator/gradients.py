"""The gradients of simulated workers: computed one by one when they are due, or all that are in flight at once."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count
from typing import NamedTuple, Protocol

import torch

from paceline.errors import RunError
from paceline.ops import Grad
from paceline.simulator.simulated_worker import SimulatedWorker
from paceline.state import Vector
from paceline.task import BatchedGradients, Task


class Gradient(NamedTuple):
    """A gradient, its loss, and the samples of its batch."""

    loss: float
    g: Vector
    size: int


class Gradients(Protocol):
    """Gradients that simulated workers have asked for."""

    def begin(self, seat: SimulatedWorker, op: Grad, due: float) -> None:
        """A worker starts to compute; x stays as it is until the gradient is due."""

    def take(self, seat: SimulatedWorker, op: Grad) -> Gradient:
        """The gradient is due: it is of the worker's next batch."""

    def stop(self, op: Grad) -> None:
        """The gradient will not be asked for."""


class SingleGradients:
    """Each gradient by itself, when it is due: the reference."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def begin(self, seat: SimulatedWorker, op: Grad, due: float) -> None:
        pass

    def stop(self, op: Grad) -> None:
        pass

    def take(self, seat: SimulatedWorker, op: Grad) -> Gradient:
        try:
            batch = next(seat.batches)
        except StopIteration:
            where = f"worker:{seat.worker.rank}, step {seat.worker.t}"
            raise RunError(f"{where}: the task has no more mini-batches") from None
        batch = seat.hooks.feed(batch)
        out = torch.empty_like(op.x)  # all workers share one task, and each keeps its own gradient
        try:
            loss, g = self._task.grad(op.x, batch, out, seat.buffers or None)
        except Exception as error:
            error.add_note(f"in the gradient of worker:{seat.worker.rank}, step {seat.worker.t}")
            raise
        return Gradient(loss, g, batch.size)


class _Begun(NamedTuple):
    seat: SimulatedWorker
    generation: int


class _Ready(NamedTuple):
    begun: _Begun
    number: int  # of the batch among the worker's
    gradient: Gradient
    block: set[Grad]  # those that were computed together and are not used yet
    rows: int  # of the memory that they share; 1: it has its own


class GradientsInFlight:
    """Computes all gradients that are in flight as soon as the first of them is due, those that are due first in front.

    A gradient depends on x at its start and on the number of its batch alone, and x does not change in between: the
    worker waits, or `start` has copied it. A gradient whose worker has died meanwhile is never used. One that turns out
    to be of another batch, because the worker has several in flight, is computed again.

    `useful`: how many gradients the rest of the run can use, about; a block has no more.
    """

    def __init__(self, batched: BatchedGradients, workers: int, useful: Callable[[], float]) -> None:
        self.batched, self._workers, self._useful = batched, workers, useful
        self._begun: dict[Grad, _Begun] = {}
        self._order: list[tuple[float, int, int, Grad]] = []
        self._sequence = count()
        self._ready: dict[Grad, _Ready] = {}

    def begin(self, seat: SimulatedWorker, op: Grad, due: float) -> None:
        self._begun[op] = _Begun(seat, seat.generation)
        heapq.heappush(self._order, (due, seat.worker.rank, next(self._sequence), op))

    def take(self, seat: SimulatedWorker, op: Grad) -> Gradient:
        found = self._ready.pop(op, None)
        if found is None or found.number != seat.gradients:
            self._begun.setdefault(op, _Begun(seat, seat.generation))
            self._compute(op)
            found = self._ready.pop(op)
        found.block.discard(op)
        if found.rows > 4 * len(found.block) > 0:
            self._release(found.block)
        return found.gradient

    def stop(self, op: Grad) -> None:
        self._begun.pop(op, None)
        found = self._ready.pop(op, None)
        if found is not None:
            found.block.discard(op)

    def handed_over(self) -> dict[Grad, _Ready]:
        """The gradients that are ready, for one who goes on with all that are in flight; they are forgotten here."""
        ready, self._ready = self._ready, {}
        self._begun.clear()
        self._order.clear()
        return ready

    def take_back(self, seat: SimulatedWorker, op: Grad, gradient: Gradient) -> None:
        """A gradient that is ready, of the worker's next batch."""
        self._ready[op] = _Ready(_Begun(seat, seat.generation), seat.gradients, gradient, set(), 1)

    def _release(self, block: set[Grad]) -> None:
        """The memory of a block is freed when its last row is used: the last ones get memory of their own."""
        for op in block:
            one = self._ready.get(op)
            if one is not None and one.block is block:
                loss, g, size = one.gradient
                self._ready[op] = one._replace(gradient=Gradient(loss, g.clone(), size), block=set(), rows=1)

    def _compute(self, first: Grad) -> None:
        most = max(1, min(self.batched.capacity(), math.ceil(min(self._useful(), 2.0**31))))
        chosen = self._chosen(first, most)
        ranks = [begun.seat.worker.rank for _, begun in chosen]
        numbers = [begun.seat.gradients for _, begun in chosen]
        points = torch.stack([op.x.detach() for op, _ in chosen])
        try:
            block = self.batched.compute(points, ranks, numbers)
        except Exception as error:
            error.add_note(f"in {len(ranks)} gradients computed at once, the first of worker:{ranks[0]}")
            raise
        losses = block.losses.tolist()  # one transfer for all
        rows = block.gradients.unbind()
        if len(self._ready) > self._workers:  # of workers that have died
            self._ready = {op: one for op, one in self._ready.items() if _valid(one.begun)}
        together = {op for op, _ in chosen}
        for (op, begun), number, loss, g, size in zip(chosen, numbers, losses, rows, block.sizes, strict=True):
            self._ready[op] = _Ready(begun, number, Gradient(loss, g, size), together, len(rows))

    def _chosen(self, first: Grad, most: int) -> list[tuple[Grad, _Begun]]:
        """The gradient that is due, and others in flight, at most one of a worker."""
        own = self._begun.pop(first)
        chosen, ranks = [(first, own)], {own.seat.worker.rank}
        later = []
        while self._order and len(chosen) < most:
            entry = heapq.heappop(self._order)
            op = entry[3]
            begun = self._begun.get(op)
            if begun is None:  # computed before its turn
                continue
            if not _valid(begun):
                del self._begun[op]
            elif begun.seat.worker.rank in ranks:
                later.append(entry)
            else:
                ranks.add(begun.seat.worker.rank)
                chosen.append((op, begun))
                del self._begun[op]
        for entry in later:
            heapq.heappush(self._order, entry)
        return chosen


def _valid(begun: _Begun) -> bool:
    return begun.seat.generation == begun.generation
