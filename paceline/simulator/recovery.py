"""Virtual checkpoints, written part by part as in real processes, and the return of a simulation to one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.scheme import Scheme
from paceline.simulator.servers import Kept

if TYPE_CHECKING:
    from paceline.simulator.engine import SimulationEngine
    from paceline.simulator.simulated_worker import SimulatedWorker


@dataclass(frozen=True)
class WorkerPart:
    """A worker's part of a checkpoint: its state between two steps."""

    cells: dict[str, Tensor]
    buffers: dict[str, Tensor]
    rng: Tensor | None
    scheme: Scheme
    t: int
    gradients: int
    samples: int


@dataclass(frozen=True)
class SimulatedCheckpoint:
    update: int
    parts: list[WorkerPart]
    servers: Kept | None
    used: int
    dropped: int


class SimulatedRecovery:
    """Every worker saves its part between two of its steps; then the chief asks the servers to save theirs.

    So a worker's part is never newer than the servers'. In an exact run (`exact`) all parts are of one step: no worker
    begins the next step before the servers have saved, and the death of a worker makes the whole run return.
    """

    def __init__(self, engine: SimulationEngine, every: int, processes: int | None) -> None:
        self._engine, self._every = engine, every
        self.exact = processes is not None
        self._processes = processes or engine.workers
        self.returning = False
        self.returns = self.rolled_back = 0
        self._asked = 0  # the update at which the last checkpoint was asked for
        # the step (exact) or version (without a server) of the parts that are wanted; with servers any part will do
        self._wanted: int | None = None
        self._have: set[int] = set()  # workers that have saved their part since then
        self._saving = False
        self._wait: set[int] = set()  # workers that wait for the servers' part
        self.rebase()

    def rebase(self) -> None:
        """Make the present state the newest checkpoint."""
        engine = self._engine
        if engine.watched:
            self._parts = [self._part(seat) for seat in engine.seats]
            self.newest = self._checkpoint(engine.servers.kept() if engine.servers else None)
            self._asked = self.newest.update

    def ranks(self, rank: int) -> range:
        """The workers that die with this one: an exact run has several in a process."""
        return range(rank % self._processes, self._engine.workers, self._processes)

    def _checkpoint(self, kept: Kept | None) -> SimulatedCheckpoint:
        engine, accounts = self._engine, self._engine.accounts
        used, dropped = (accounts.used, accounts.dropped) if kept is None else (kept.used, kept.dropped)
        update = engine.updates if kept is None else int(kept.cells["v"])
        return SimulatedCheckpoint(update, list(self._parts), kept, used, dropped)

    def _part(self, seat: SimulatedWorker) -> WorkerPart:
        worker = seat.worker
        buffers = {name: buffer.clone() for name, buffer in seat.buffers.items()}
        rng = None if worker._rng is None else worker._rng.get_state()
        return WorkerPart(
            worker.state.saved(), buffers, rng, seat.driver.scheme, worker.t, seat.gradients, seat.samples
        )

    def between(self, seat: SimulatedWorker) -> bool:
        """A worker is between two steps: whether it may begin the next one now."""
        rank, engine = seat.worker.rank, self._engine
        if self.returning or rank in self._wait:
            return False
        if rank == 0 and self._every and self._wanted is None and engine.updates >= self._asked + self._every:
            self._asked = engine.updates
            # no worker is past it yet: in these schemes none is two ahead of another
            self._wanted = seat.worker.t + 2 if engine.servers else seat.worker.state.v + 2
            if engine.scheme.decentralised:  # there a worker may be
                self._wanted = max(int(other.worker.state.v) for other in engine.seats) + 2
            self._have.clear()
        if self._wanted is None:
            return True
        if rank not in self._have and self._reached(seat):
            self._parts[rank] = self._part(seat)
            self._have.add(rank)
            if self.exact and (engine.servers or rank == 0):
                self._wait.add(rank)
            chief = engine.seats[0]
            if self.exact and rank and 0 in self._wait and self._all_have():  # the chief waits for this one
                self._wait.discard(0)
                engine.begin(chief)
        if rank == 0 and self._all_have():
            return self._write(seat)
        return rank not in self._wait

    def _reached(self, seat: SimulatedWorker) -> bool:
        assert self._wanted is not None
        if self._engine.servers:
            return not self.exact or seat.worker.t >= self._wanted
        return bool(seat.worker.state.v >= self._wanted)

    def _all_have(self) -> bool:
        return all(seat.worker.rank in self._have or not seat.worker.alive for seat in self._engine.seats)

    def _write(self, chief: SimulatedWorker) -> bool:
        if self._engine.servers is None:
            self.newest = self._checkpoint(None)
            self._over()
            return True
        self._wait.add(0)
        if not self._saving:
            self._saving = True
            self._engine.later(chief, self._engine.message(chief, 0), self.on_save)
        return False

    def on_save(self, chief: SimulatedWorker) -> None:
        """The request to save has arrived at the servers."""
        engine, generation = self._engine, chief.generation
        assert engine.servers is not None

        def done(kept: Kept) -> None:
            if chief.generation == generation:
                engine.later(chief, engine.message(chief, 0, inward=True), self.on_saved, kept)

        engine.deliver_answers(engine.servers.save(done))

    def on_saved(self, chief: SimulatedWorker, kept: Kept) -> None:
        self.written(kept)
        self._engine.resume(chief)

    def written(self, kept: Kept) -> None:
        """The chief has the answer: the servers have saved their part."""
        self.newest = self._checkpoint(kept)
        self._over()

    def _over(self) -> None:
        self._wanted, self._saving = None, False
        waiting, self._wait = sorted(self._wait), set()
        for rank in waiting:
            if rank:
                self._engine.begin(self._engine.seats[rank])

    def died(self, rank: int) -> None:
        """A half-written checkpoint dies with the chief; it does not wait for another worker that died."""
        self._wait.discard(rank)
        if rank == 0:
            self._wanted, self._saving = None, False

    def tear(self, shard: int | None, back: float = 0.0) -> None:
        """A server died inside a call, or a worker of an exact run died: the whole run will return."""
        engine = self._engine
        if shard is not None and engine.servers is not None:
            engine.servers.spoil(shard)
            engine.servers.kill(shard)
            if math.isfinite(back):
                engine.injector.bring_back_server(shard, back)
        self.returning = True
        for seat in engine.seats:
            engine.accounts.forgotten(seat)
            seat.generation += 1
            seat.waits_for, seat.unread = None, 0
            seat.driver.close()
        engine.means.forget()
        engine.meetings.forget()
        self._wait.clear()
        self._wanted, self._saving = None, False
        if engine.servers is not None:
            for rank in engine.servers.forget():
                engine.injector.restart(rank)
        self.try_return()

    def try_return(self) -> None:
        """Return as soon as every server (and in an exact run every worker) is running."""
        if self._may_return():
            self._engine.schedule(self._engine.now, self._return)

    def _may_return(self) -> bool:
        engine = self._engine
        if not self.returning or (engine.servers is not None and not engine.servers.up):
            return False
        return not self.exact or all(seat.worker.alive for seat in engine.seats)

    def _return(self) -> None:
        if not self._may_return():  # another process has died in the meantime, or the run has returned already
            return
        engine, servers = self._engine, self._engine.servers
        self.restore()
        for rank, known in enumerate(list(servers.known) if servers is not None else ()):
            alive = engine.seats[rank].worker.alive
            if servers is not None and known != alive:  # the servers' checkpoint knows another membership
                engine.deliver_answers(servers.joined(rank) if alive else servers.left(rank))
                if self.returning:  # the lead died inside that
                    return
        for seat in engine.seats:
            if seat.worker.alive:
                engine.begin(seat)

    def restore(self) -> None:
        """Restore the newest checkpoint."""
        engine, saved = self._engine, self.newest
        self.returning = False
        self.returns += 1
        reached = engine.updates if engine.servers else max(int(seat.worker.state.v) for seat in engine.seats)
        self.rolled_back += max(reached - saved.update, 0)
        engine.accounts.returned(saved.used, saved.dropped)
        self._parts = list(saved.parts)
        self._asked = saved.update
        for seat, part in zip(engine.seats, saved.parts, strict=True):
            self._restore(seat, part)
        engine.gradients = sum(seat.gradients for seat in engine.seats)
        engine.samples = sum(seat.samples for seat in engine.seats)
        if engine.servers is not None and saved.servers is not None:
            # the servers' part may contain gradients that a worker's older part has not counted yet
            engine.gradients, engine.samples = saved.servers.gradients, saved.servers.samples
            engine.servers.restore(saved.servers)
        engine.rewound = True
        engine.choose_centre()

    def _restore(self, seat: SimulatedWorker, part: WorkerPart) -> None:
        engine, worker = self._engine, seat.worker
        worker.state.restore(part.cells)
        for name, buffer in part.buffers.items():
            seat.buffers[name].copy_(buffer)
        if part.rng is None:
            worker._rng = None
        else:
            worker.rng.set_state(part.rng)
        seat.driver.scheme = part.scheme
        worker.t, seat.gradients, seat.samples = part.t, part.gradients, part.samples
        seat.batches = engine.task.batches(worker.rank, engine.workers, engine.seed, first=part.gradients)
