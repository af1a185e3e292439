"""The short way of a batched simulation through asynchronous steps: many workers push and pull in a row, at once."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from paceline.compute_times import Constant
from paceline.errors import SchemeError
from paceline.ops import Grad
from paceline.scheme import Scheme
from paceline.simulator.gradients import Gradient, GradientsInFlight
from paceline.simulator.simulated_worker import Event
from paceline.state import Vector

if TYPE_CHECKING:
    from paceline.simulator.engine import SimulationEngine

EVENTS = 5  # of a step: the gradient is due; the push arrives, and is answered; the pull likewise
AWAITS = 3  # of a step
ROUNDS = 16  # gradients of each worker before the engine's own counts are written again


class ExchangeLane:
    """Performs `push(g); pull()` of many workers in the order of their moments, without an event for each.

    For schemes that have `exchanged`, in runs in which nothing else can happen between two gradients: messages are
    free, and there are no faults, hooks or further servers. The parameters of the workers are the rows of `points`. At
    both ends every worker waits for a gradient at its own x, as the engine would have it at that moment.
    """

    def __init__(
        self,
        engine: SimulationEngine,
        flight: GradientsInFlight,
        points: Tensor,
        events: list[Event],
        sequence: Iterator[int],
        on_grad: Callable[..., None],
    ) -> None:
        self._engine, self._flight, self._points = engine, flight, points
        self._events, self._sequence, self._on_grad = events, sequence, on_grad
        self._everyone = list(range(engine.workers))
        self._kept: Tensor | None = None  # gradients that are ready, in the row of their worker
        self._newest: tuple[list[int], Tensor] | None = None  # gradients that are not in `_kept` yet, and their workers
        self._unread: tuple[list[int], Tensor] | None = None  # losses that are still on the device, and their workers
        self._ready: list[bool] = []  # workers whose next gradient is computed
        constant = type(engine.cost.compute_law) is Constant
        times = (engine.cost.compute(seat.worker.rank, 0, seat.rng) for seat in engine.seats)
        self._fixed = list(times) if constant else None  # seconds of a gradient of each worker
        self._holders = np.array([engine.scheme.holder(rank) for rank in self._everyone], np.int64)

    def open(self, seconds: float) -> bool:
        """Whether only gradients are to come, the first one until `seconds`."""
        events = self._events
        return len(events) == len(self._everyone) and events[0][4] == self._on_grad and events[0][0] <= seconds

    def _clear(self) -> bool:
        """Whether every worker waits for a gradient at its own x."""
        for _, rank, _, generation, handler, payload in self._events:
            seat = self._engine.seats[rank]
            if rank < 0 or handler != self._on_grad or seat.generation != generation:
                return False
            op, target = payload
            if seat.waits_for is not target or op.x.data_ptr() != self._points[rank].data_ptr() or seat.norm.asked:
                return False
        return True

    def run(self, most: float, seconds: float) -> bool:
        """At most this number of updates, not later than `seconds`; whether there were any. A gradient whose loss is
        not finite is left to the engine."""
        workers = len(self._everyone)
        left = int(min(most, ROUNDS * workers))
        if left < max(1, workers // 8) or not self._clear():
            return False
        targets = {event[1]: event for event in self._events}
        self._heap = [(event[0], event[1]) for event in self._events]
        heapq.heapify(self._heap)
        self._begin(targets)
        before = self._engine.updates
        try:
            while left > 0 and not self._odd and self._heap[0][0] <= seconds:
                if not self._ready[self._heap[0][1]]:
                    self._compute(left)
                order = self._finite(self._due(left, seconds))
                if order:
                    self._exchange(order)
                    left -= len(order)
        finally:
            self._end(targets)
        return self._engine.updates > before

    def _begin(self, targets: dict[int, Event]) -> None:
        engine, workers = self._engine, self._engine.workers
        self._odd = False
        self._issued = [seat.issued for seat in engine.seats]
        self._numbers = np.array([seat.gradients for seat in engine.seats], np.int64)
        self._before = self._numbers.copy()
        self._versions = np.array([seat.worker.state.v for seat in engine.seats], np.int64)
        self._samples = np.zeros(workers, np.int64)
        self._sizes = np.zeros(workers, np.int64)
        self._losses = np.full(workers, math.nan)
        self._last = self._losses.copy()  # losses of the gradients that were pushed
        self._ready = [False] * workers
        self._newest = None
        self._times: list[float] = []
        for op, one in self._flight.handed_over().items():
            rank = one.begun.seat.worker.rank
            if rank in targets and targets[rank][5][0] is op and one.number == self._numbers[rank]:
                self._keep([rank], one.gradient.g[None])
                self._ready[rank], self._losses[rank], self._sizes[rank] = True, one.gradient.loss, one.gradient.size
        self._fresh = [(due, rank) for due, rank in self._heap if not self._ready[rank]]  # not computed yet

    def _due(self, most: int, seconds: float) -> list[int]:
        """The workers whose gradients are due next and ready, in their order; each starts its next gradient. No value
        is needed for that: a GPU may still be computing."""
        heap, ready, issued, fresh = self._heap, self._ready, self._issued, self._fresh
        cost, seats, replace = self._engine.cost, self._engine.seats, heapq.heapreplace
        law, speeds, fixed = cost.compute_law, cost.speeds, self._fixed
        order: list[int] = []
        times = self._times = []
        while len(order) < most:
            now, rank = heap[0]
            if not ready[rank] or now > seconds:
                break
            ready[rank] = False
            order.append(rank)
            times.append(now)
            if fixed is not None:
                entry = (now + fixed[rank], rank)
            else:
                drawn = law.draw(rank, issued[rank], seats[rank].rng)
                entry = (now + (drawn / speeds[rank] if speeds else drawn), rank)
            issued[rank] += 1
            replace(heap, entry)
            fresh.append(entry)
        return order

    def _finite(self, order: list[int]) -> list[int]:
        """The workers before the first one with a loss that is not finite; it and those after it have not been due."""
        self._read_losses()
        finite = np.isfinite(self._losses[order])
        if finite.all():
            return order
        self._odd = True
        number = int(finite.argmin())
        undone = set(order[number:])
        waiting = [entry for entry in self._heap if entry[1] not in undone]
        self._heap = waiting + list(zip(self._times[number:], order[number:], strict=True))
        heapq.heapify(self._heap)
        self._fresh = [entry for entry in self._fresh if entry[1] not in undone]
        for rank in undone:
            self._ready[rank] = True
            self._issued[rank] -= 1
        return order[:number]

    def _read_losses(self) -> None:
        if self._unread is not None:
            ranks, losses = self._unread
            self._losses[ranks] = losses.tolist()  # one transfer for all
            self._unread = None

    def _exchange(self, order: list[int]) -> None:
        engine = self._engine
        servers = engine.servers
        assert servers is not None
        state, ledger, number = servers.state, servers.scheduler.ledger, len(order)
        if self._newest is not None and order == self._newest[0]:
            gradients, self._newest = self._newest[1], None
        else:
            gradients = self._rows_kept(order)
        version = state.v
        after = engine.scheme.exchanged(state, gradients)
        if after is None or state.v != version + number:
            raise SchemeError(f"{engine.scheme.name}.exchanged() did not perform {number} pushes")
        if order == self._everyone:
            self._points.copy_(after)
        else:
            self._points.index_copy_(0, self._index(order), after)
        ranks = np.array(order, np.int64)
        versions = version + np.arange(number, dtype=np.int64)
        ledger.admit_row(self._holders[ranks], versions - self._versions[ranks], versions + 1)
        self._versions[ranks] = versions + 1
        servers.scheduler.calls += 2 * number
        self._numbers[ranks] += 1
        self._samples[ranks] += self._sizes[ranks]
        self._last[ranks] = self._losses[ranks]
        engine.loss, engine.now = float(self._losses[order[-1]]), self._times[number - 1]

    def _compute(self, most: int) -> None:
        """All gradients that are in flight, those that are due first in front."""
        self._fresh.sort()
        room = max(1, min(self._flight.batched.capacity(), most))
        chosen = [rank for _, rank in self._fresh[:room]]
        del self._fresh[:room]
        self._spill()
        points = self._points if chosen == self._everyone else self._points.index_select(0, self._index(chosen))
        block = self._flight.batched.compute(points, chosen, self._numbers[chosen].tolist())
        self._newest, self._unread = (chosen, block.gradients), (chosen, block.losses)
        self._sizes[chosen] = block.sizes
        for rank in chosen:
            self._ready[rank] = True

    def _index(self, ranks: Sequence[int]) -> Tensor:
        return torch.tensor(ranks, dtype=torch.int64).to(self._points.device)

    def _spill(self) -> None:
        self._read_losses()
        if self._newest is not None:
            self._keep(*self._newest)
            self._newest = None

    def _keep(self, ranks: list[int], gradients: Tensor) -> None:
        if self._kept is None:
            self._kept = torch.empty_like(self._points)
        if len(ranks) == 1 and gradients.data_ptr() == self._kept[ranks[0]].data_ptr():
            return
        self._kept.index_copy_(0, self._index(ranks), gradients)

    def _rows_kept(self, ranks: list[int]) -> Tensor:
        self._spill()
        assert self._kept is not None
        return self._kept.index_select(0, self._index(ranks))

    def _end(self, targets: dict[int, Event]) -> None:
        """Write what happened into the engine: each worker waits for its next gradient."""
        engine = self._engine
        self._spill()
        events: list[Event] = []
        for due, rank in self._heap:
            seat, (op, target) = engine.seats[rank], targets[rank][5]
            assert isinstance(op, Grad)
            steps, samples = int(self._numbers[rank] - self._before[rank]), int(self._samples[rank])
            if steps:
                seat.worker.t += steps
                seat.gradients += steps
                seat.samples += samples
                seat.issued += steps
                seat.awaits += AWAITS * steps
                seat.worker.loss = float(self._last[rank])
                seat.worker.state.v = int(self._versions[rank])
                engine.gradients += steps
                engine.samples += samples
                engine.events += EVENTS * steps
            events.append((due, rank, next(self._sequence), seat.generation, self._on_grad, (op, target)))
            if self._ready[rank]:
                assert self._kept is not None
                gradient = Gradient(float(self._losses[rank]), self._kept[rank], int(self._sizes[rank]))
                self._flight.take_back(seat, op, gradient)
            else:
                self._flight.begin(seat, op, due)
        heapq.heapify(events)
        self._events[:] = events


def exchanges(scheme: Scheme, x: Vector) -> bool:
    """Whether a scheme performs pushes and pulls at once, with rates that stay as they are. A class that inherits its
    `exchanged` may have another step."""
    if scheme._scheduled or scheme.compressor is not None or "exchanged" not in vars(type(scheme)):
        return False
    return scheme.exchanged(scheme.server(x, 1), torch.zeros_like(x)[None]) is not None
