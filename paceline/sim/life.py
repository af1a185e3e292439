"""Death and return of simulated workers, and the other faults that a run is told to have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.sim.faults import Fault
from paceline.sim.seat import Seat

if TYPE_CHECKING:
    from paceline.sim.engine import Engine


class Life:
    """Lets faults happen: at a time (an event of its own), at an update, or at a worker's own step or await."""

    def __init__(self, engine: Engine, faults: Sequence[Fault]) -> None:
        self._engine = engine
        self._at_update: list[Fault] = []
        for fault in sorted(faults, key=lambda fault: fault.when):
            if fault.unit == "time":
                engine.schedule(fault.when, self.strike, fault)
            elif fault.unit == "update":
                self._at_update.append(fault)
            else:
                engine.seats[fault.rank].faults.append(fault)

    def updated(self, updates: int) -> None:
        """The centre has changed."""
        while self._at_update and updates >= self._at_update[0].when:
            self.strike(self._at_update.pop(0))

    def struck(self, seat: Seat, unit: str, reached: int) -> bool:
        """Let the faults happen that wait for this step or await; tells whether the worker is dead now."""
        if not seat.faults:
            return not seat.worker.alive
        for fault in [one for one in seat.faults if one.unit == unit and reached >= one.when]:
            seat.faults.remove(fault)
            self.strike(fault)
        return not seat.worker.alive

    def strike(self, fault: Fault) -> None:
        engine, seat = self._engine, self._engine.seats[fault.rank]
        until = engine.now + fault.duration
        match fault.action:
            case "kill":
                self.kill(fault.rank)
                if math.isfinite(until):
                    engine.schedule(until, self.strike, Fault("restart", fault.rank, until))
            case "restart":
                self.restart(fault.rank)
            case "delay":
                seat.frozen_until = max(seat.frozen_until, until)
            case "partition":
                seat.cut_until = max(seat.cut_until, until)

    def kill(self, rank: int) -> None:
        """The worker is gone at once: its locals, its waiting calls and its messages under way."""
        engine, seat = self._engine, self._engine.seats[rank]
        if not seat.worker.alive:
            return
        seat.worker.alive = seat.parked = False
        seat.generation += 1
        seat.waits_for = None
        seat.driver.close()
        engine.choose_centre()
        engine.deliver_means(engine.meetings.left(rank))
        if engine.desk is not None:
            engine.deliver_answers(engine.desk.left(rank, quorum=engine.shrink))

    def restart(self, rank: int) -> None:
        """The worker comes back with its cells and begins its step anew."""
        engine, seat = self._engine, self._engine.seats[rank]
        if seat.worker.alive:
            return
        if engine.desk is None:
            arrival = engine.last_mean_arrives()
            if arrival is not None:  # until then the others stand at different versions: none of them to join
                when = math.nextafter(arrival, math.inf)
                engine.schedule(when, self.strike, Fault("restart", rank, when))
                return
            peer = next((other for other in engine.seats if other.worker.alive), None)
            if peer is not None and (engine.shrink or peer.worker.state.v > seat.worker.state.v):
                # the others went on without it: their state is the run's now
                seat.worker.state.restore(peer.worker.state.saved())
                seat.worker.t = peer.worker.t
                for name, buffer in peer.buffers.items():
                    seat.buffers[name].copy_(buffer)
        seat.worker.alive = True
        engine.choose_centre()
        engine.meetings.joined(rank)
        if engine.desk is not None:
            engine.deliver_answers(engine.desk.joined(rank, quorum=engine.shrink))
        engine.begin(seat)
