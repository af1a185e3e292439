"""The simulator: real gradients, real calls, virtual time. One heap of events decides what happens next.

Events are ordered by (time, worker, sequence number), so equal times are settled the same way in every run.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.desk import Answer, Desk
from paceline.drive import Driver
from paceline.errors import LossError, RunError, SchemeError
from paceline.ops import Call, Grad, Mean, Op, Pending, Sleep, Start, copied
from paceline.result import Staleness
from paceline.scheme import Scheme
from paceline.seeds import mixed
from paceline.sim.cost import SERVER, Cost
from paceline.sim.faults import Fault
from paceline.sim.life import Life
from paceline.sim.meeting import Meetings
from paceline.sim.seat import Seat
from paceline.sim.stuck import stuck
from paceline.state import State, Vector
from paceline.task import Task
from paceline.worker import Worker

Target = Pending[Any] | None  # who gets a result: the step itself, or an operation that it started


class Engine:
    """Runs `workers` copies of a scheme's step against one desk. `run` may be called again to go on."""

    def __init__(
        self,
        task: Task,
        scheme: Scheme,
        *,
        workers: int,
        seed: int,
        cost: Cost,
        faults: Sequence[Fault] = (),
        shrink: bool = True,
    ) -> None:
        self.task, self.scheme, self.cost, self.seed, self.shrink = task, scheme, cost, seed, shrink
        self.workers = workers
        self.now = 0.0
        self.events = self.gradients = self.samples = 0
        self.loss = math.nan  # of the last gradient
        self.stopped: str | None = None  # why a hook asked for the end
        self.recorded: list[dict[str, float]] = []  # what hooks put into the history, with update and seconds
        self._heap: list[tuple[float, int, int, int, Callable[..., None], Any]] = []
        self._sequence = count()
        self._x0 = task.start(seed)
        self.desk = Desk(scheme, scheme.server(self._x0, workers), workers) if scheme.methods else None
        self.seats = [self._seat(rank) for rank in range(workers)]
        self.meetings = Meetings(self.seats, shrink)
        self._free_network = not cost.links and cost.network.latency == 0 and math.isinf(cost.network.bandwidth)
        self._messages = {self._on_call, self._on_answer, self._on_mean, self._on_part}
        self._park_at: int | None = None
        self.choose_centre()
        self.life = Life(self, faults)
        for seat in self.seats:
            self.begin(seat)

    def _seat(self, rank: int) -> Seat:
        worker = Worker(rank, self.workers, self.scheme.worker(self._x0, self.workers), self.seed)
        rng = np.random.Generator(np.random.PCG64(mixed(self.seed, "compute", rank)))
        batches = self.task.batches(rank, self.workers, self.seed)
        seat = Seat(worker, Driver(self.scheme, worker), batches, rng)
        seat.buffers = self.task.buffers()
        return seat

    @property
    def centre(self) -> State:
        """The server's state, or the chief's where there is no server (the lowest living worker stands in)."""
        return self._chief().worker.state if self.desk is None else self.desk.state

    def _chief(self) -> Seat:
        return next((seat for seat in self.seats if seat.worker.alive), self.seats[0])

    def choose_centre(self) -> None:
        """Look again whose state the centre is; called when somebody dies or comes back."""
        self._centre = self.centre

    @property
    def updates(self) -> int:
        """How often the centre has changed."""
        version: int = self.centre.v
        return version

    @property
    def staleness(self) -> Staleness:
        """How old the gradients were that have entered the centre."""
        if self.desk is None:  # nobody can be behind
            return Staleness(histogram={0: self.gradients} if self.gradients else {})
        ledger = self.desk.ledger
        return Staleness(ledger.mean(), ledger.cells.largest, ledger.histogram(), ledger.outstanding(self.updates))

    def run(
        self,
        updates: int | None = None,
        *,
        seconds: float = math.inf,
        park_at: int | None = None,
        watch: Callable[[Engine], None] | None = None,
    ) -> None:
        """Go on until the centre has had `updates` changes, `seconds` have passed, or every worker has made its first
        `park_at` steps. `watch` is called after each change of the centre."""
        self._park_at = park_at
        for seat in self.seats:
            if seat.parked and seat.worker.alive:
                seat.parked = False
                self.begin(seat)
        goal = math.inf if updates is None else updates
        heap, pop, messages = self._heap, heapq.heappop, self._messages
        last, quiet = self.updates, 0
        patience = 100_000 + 1_000 * self.workers
        with torch.no_grad():
            while last < goal and self.stopped is None:
                if not heap:
                    if park_at is None:
                        raise stuck(self)
                    return
                entry = pop(heap)
                time, rank, _, generation, handler, payload = entry
                if time > seconds:
                    heapq.heappush(heap, entry)
                    self.now = seconds
                    return
                if rank < 0:
                    self.now = time
                    handler(payload)
                else:
                    seat = self.seats[rank]
                    if seat.generation != generation:
                        continue  # of a former life: it does not even make time pass
                    self.now = time
                    held = max(seat.frozen_until, seat.cut_until if handler in messages else -math.inf)
                    if time < held:
                        # at `held` to the bit: sums of differences would shuffle what waits for the same moment
                        heapq.heappush(heap, (held, rank, next(self._sequence), generation, handler, payload))
                        continue
                    handler(seat, payload)
                self.events += 1
                if self._centre.v > last:  # a deputy of the chief may be behind at first
                    last, quiet = self._centre.v, 0
                    if watch is not None:
                        watch(self)
                    if last < goal:
                        self.life.updated(last)
                else:
                    quiet += 1
                    if quiet > patience:
                        raise RunError(f"{quiet} events without a change of the centre: nothing is ever pushed")

    def evaluate(self, x: Vector | None = None) -> dict[str, float]:
        """The metrics of what the centre holds now, or of x."""
        task, buffers = self.task, None
        if self.seats[0].buffers:
            chief = self._chief().buffers
            trained = [seat.buffers for seat in self.seats if seat.worker.alive and seat.gradients]
            rows = trained or [chief]  # who is dead or has seen no data has nothing to say
            average = {name: _average([row[name] for row in rows]) for name in chief}
            buffers = chief if task.buffer_policy == "chief" else average
        return task.evaluate(self.scheme.model(self.centre) if x is None else x, buffers)

    def clear(self) -> None:
        """Forget everything that is under way."""
        self._heap.clear()

    def begin(self, seat: Seat) -> None:
        """Let a worker begin its next step, as soon as the events of this moment allow."""
        self._later(seat, 0.0, self._on_begin, None)

    def schedule(self, when: float, handler: Callable[..., None], payload: Any) -> None:
        """Something that happens to the run as a whole, before what workers do at the same moment."""
        heapq.heappush(self._heap, (when, -1, next(self._sequence), 0, handler, payload))

    def _later(self, seat: Seat, seconds: float, handler: Callable[..., None], payload: Any) -> None:
        when, rank = self.now + seconds, seat.worker.rank
        heapq.heappush(self._heap, (when, rank, next(self._sequence), seat.generation, handler, payload))

    def _on_begin(self, seat: Seat, _: None) -> None:
        self._resume(seat, None)

    def _resume(self, seat: Seat, answer: Any) -> None:
        """Let a worker go on until it has to wait."""
        driver, worker = seat.driver, seat.worker
        seat.waits_for = None
        while True:
            if not driver.running:
                if self.life.struck(seat, "step", worker.t):
                    return
                if self._park_at is not None and worker.t >= self._park_at:
                    seat.parked = True
                    return
                for hook in seat.before_step:
                    hook()
                driver.begin()
                answer = None
            op = driver.advance(answer)
            if op is None:
                if driver.awaits == 0:
                    raise SchemeError(f"worker:{worker.rank}, step {worker.t}: step() ended without awaiting anything")
                worker.t += 1
                for hook in seat.after_step:
                    hook()
                if seat.leaves is not None:
                    self._leave(seat)
                    return
                if worker.state is self._centre:
                    self.begin(seat)  # the run may end between two steps
                    return
                continue
            seat.awaits += 1
            if isinstance(op, Start):
                pending: Pending[Any] = Pending(op.op)
                self._issue(seat, copied(op.op), pending)
                answer = pending
            elif isinstance(op, Pending) and op.done:
                answer = op.result
            else:
                seat.waits_for = op
                if isinstance(op, Pending):
                    op.waited = True
                else:
                    self._issue(seat, op, None)
                self.life.struck(seat, "await", seat.awaits)
                return
            if self.life.struck(seat, "await", seat.awaits):
                return

    def _issue(self, seat: Seat, op: Op[Any], target: Target) -> None:
        rank = seat.worker.rank
        match op:
            case Grad():
                seat.issued += 1
                seconds = self.cost.compute(rank, seat.issued - 1, seat.rng)
                self._later(seat, seconds, self._on_grad, (op, target))
            case Call() if self.desk is not None and self.scheme.methods.get(op.method.name) is op.method:
                if op.method.atomic:
                    self._later(seat, self._message(rank, SERVER, op.args), self._on_call, (op, target))
                else:
                    self._in_pieces(seat, op, target)
            case Call():
                raise SchemeError(f"worker:{rank} called {op.method.name}(), which is not a method of its own scheme")
            case Mean():
                self._later(seat, self._message(rank, SERVER, op.v), self._on_mean, (op, target))
            case Sleep(seconds):
                if not (seconds >= 0 and math.isfinite(seconds)):
                    raise SchemeError(f"worker:{rank} would sleep {seconds} seconds; give a finite number, at least 0")
                self._later(seat, seconds, self._on_answer, (target, None))
            case _:
                raise SchemeError(f"worker:{rank}: {type(op).__name__} cannot be started")

    def _deliver(self, seat: Seat, target: Target, result: Any) -> None:
        if target is None:
            self._resume(seat, result)
            return
        target.done, target.result = True, result
        if target.waited:
            self._resume(seat, result)

    def _on_grad(self, seat: Seat, payload: tuple[Grad, Target]) -> None:
        op, target = payload
        worker = seat.worker
        try:
            batch = next(seat.batches)
        except StopIteration:
            raise RunError(f"worker:{worker.rank}, step {worker.t}: the task has no more mini-batches") from None
        for feed in seat.feed:
            batch = feed(batch)
        out = torch.empty_like(op.x)  # one task serves all workers here, and each keeps its own gradient
        try:
            loss, g = self.task.grad(op.x, batch, out, seat.buffers or None)
        except Exception as error:
            error.add_note(f"in the gradient of worker:{worker.rank}, step {worker.t}")
            raise
        if not math.isfinite(loss) and not seat.guards_loss:
            raise LossError(
                f"worker:{worker.rank}, step {worker.t}, update {self.updates}: the loss is {loss}; "
                "a smaller lr (or fewer workers at this lr) is the usual cure"
            )
        seat.gradients += 1
        self.gradients += 1
        self.samples += batch.size
        worker.loss = self.loss = loss
        for hook in seat.after_gradient:
            hook(loss)
            if self.stopped is not None:  # this gradient may be the reason: it must not enter anything
                return
        self._deliver(seat, target, g)

    def _on_call(self, seat: Seat, payload: tuple[Call[Any], Target]) -> None:
        op, target = payload
        assert self.desk is not None
        self.deliver_answers(self.desk.submit(seat.worker.rank, op, (seat.generation, target)))

    def deliver_answers(self, answers: Sequence[Answer]) -> None:
        for rank, (generation, target), result in answers:
            seat = self.seats[rank]
            if seat.generation == generation:
                self._later(seat, self._message(SERVER, rank, result), self._on_answer, (target, result))

    def _on_answer(self, seat: Seat, payload: tuple[Target, Any]) -> None:
        self._deliver(seat, *payload)

    def _in_pieces(self, seat: Seat, op: Call[Any], target: Target) -> None:
        length, pieces = len(self._x0), max(1, min(getattr(self.scheme, "chunks", 1), len(self._x0)))
        edges = [length * k // pieces for k in range(pieces + 1)]
        number = mixed(self.seed, "access", seat.worker.rank, seat.awaits)
        results: list[Any] = []
        for k, seconds in enumerate(self.cost.pass_over(seat.worker.rank, pieces, number)):
            part = (edges[k], edges[k + 1], length)
            self._later(seat, seconds, self._on_part, (op, target, part, results))

    def _on_part(self, seat: Seat, payload: tuple[Call[Any], Target, tuple[int, int, int], list[Any]]) -> None:
        op, target, part, results = payload
        assert self.desk is not None
        result, answers = self.desk.perform_part(seat.worker.rank, op, part)
        results.append(result)
        self.deliver_answers(answers)
        if part[1] == part[2]:
            self._deliver(seat, target, _joined(results))

    def _on_mean(self, seat: Seat, payload: tuple[Mean, Target]) -> None:
        op, target = payload
        self.deliver_means(self.meetings.arrive(seat.worker.rank, op, target))

    def deliver_means(self, met: Sequence[tuple[int, Target, Vector]]) -> None:
        for rank, target, mean in met:
            self._later(self.seats[rank], self._message(SERVER, rank, mean), self._on_answer, (target, mean))

    def _message(self, source: int, target: int, content: Any) -> float:
        return 0.0 if self._free_network else self.cost.message(source, target, _bytes(content))

    def kill(self, rank: int) -> None:
        """The worker is gone at once: its locals, its waiting calls and its messages under way."""
        self.life.kill(rank)

    def _leave(self, seat: Seat) -> None:
        """A goodbye between two steps is a death that takes nothing along; that of the last one ends the run."""
        if any(other.worker.alive for other in self.seats if other is not seat):
            self.kill(seat.worker.rank)
        else:
            self.stopped = seat.leaves

    def restart(self, rank: int) -> None:
        """The worker comes back with its cells and begins its step anew."""
        self.life.restart(rank)

    def last_mean_arrives(self) -> float | None:
        """When the last mean will have arrived that is ready but still under way to a living worker."""
        times = [
            time
            for time, rank, _, generation, handler, payload in self._heap
            if handler == self._on_answer and payload[1] is not None and generation == self.seats[rank].generation
        ]
        return max(times, default=None)


def _average(rows: Sequence[Tensor]) -> Tensor:
    stacked = torch.stack(list(rows))
    return stacked.mean(dim=0) if stacked.is_floating_point() else stacked.amax(dim=0)


def _bytes(content: Any) -> int:
    if isinstance(content, Tensor):
        return content.numel() * content.element_size()
    return sum(map(_bytes, content)) if isinstance(content, tuple) else 8


def _joined(results: Sequence[Any]) -> Any:
    """One result from those of the pieces: tensors end to end, numbers from the first piece."""
    first = results[0]
    if isinstance(first, Tensor):
        return torch.cat(list(results), dim=-1) if first.dim() else first
    if isinstance(first, tuple):
        return tuple(_joined(items) for items in zip(*results, strict=True))
    return first
