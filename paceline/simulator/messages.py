"""Messages between workers in virtual time: each arrives when the network has carried it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.ops import MESSAGE_CELLS, PeerMessage, Send, content
from paceline.runtime.messages import ARRIVAL, TO, MessageCells, arrived, free_slot

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.simulator.engine import SimulationEngine
    from paceline.simulator.simulated_worker import SimulatedWorker


class SimulatedMessages:
    """The messages of a run whose scheme sends any. Their arrival times are in cells, so they need no events."""

    def __init__(self, engine: SimulationEngine) -> None:
        self._engine = engine
        self._cells = [MessageCells(seat.worker.rank, seat.worker.state) for seat in engine.seats]
        self._carried: dict[tuple[int, int], Any] = {}  # by rank and slot: what crosses the network of a message
        self._undo: list[dict[str, Tensor]] = [{} for _ in engine.seats]

    def cells(self, rank: int) -> MessageCells:
        return self._cells[rank]

    def finished(self, rank: int) -> int:
        return self._engine.seats[rank].worker.t

    def arrived(self, sender: int, slot: int) -> bool:
        return bool(self._cells[sender].numbers[slot, ARRIVAL] <= self._engine.now)

    def send(self, seat: SimulatedWorker, op: Send) -> bool:
        peer, own = self._engine.seats[op.to].worker, self._cells[seat.worker.rank]
        if not peer.alive or peer.state.v >= self._engine.goal or (slot := free_slot(self, own, 0)) is None:
            return False
        own.put(slot, op, seat.worker.t, 0)
        self._carried[own.rank, slot] = content(op)
        return True

    def receive(self, seat: SimulatedWorker) -> tuple[PeerMessage, ...]:
        own = self._cells[seat.worker.rank]
        places = arrived(self, own, range(len(self._cells)), 0)
        return tuple([own.take(place, self._cells[place.sender], seat.worker.t, 0) for place in places])

    def begin(self, seat: SimulatedWorker) -> None:
        """A step begins: keep what it may change, in case that it is never finished."""
        state = seat.worker.state
        self._undo[seat.worker.rank] = {name: state.cell(name).clone() for name in state if name != MESSAGE_CELLS[0]}

    def died(self, seat: SimulatedWorker) -> None:
        """A worker has died inside a step, which has neither sent nor taken anything."""
        state, undo = seat.worker.state, self._undo[seat.worker.rank]
        state.restore(undo | {MESSAGE_CELLS[0]: state.cell(MESSAGE_CELLS[0])})

    def leave(self, seat: SimulatedWorker) -> None:
        """A step is finished: its messages leave."""
        engine, own = self._engine, self._cells[seat.worker.rank]
        for slot in own.sent_in(seat.worker.t - 1):
            there, v = engine.seats[own.heads[slot, TO]], self._carried.pop((own.rank, slot), own.vectors[slot])
            seconds = engine.message(seat, v) + engine.message(there, v, inward=True)
            cut = max(engine.injector.apart((seat.worker.rank, there.worker.rank)), seat.cut_until, there.cut_until)
            own.numbers[slot, ARRIVAL] = max(engine.now + seconds, cut)

    def cut_off(self, one: int, other: int | None, until: float) -> None:
        """Two workers, or one and all others, cannot reach each other: messages between them wait."""
        for sender in self._cells:
            for slot, head in enumerate(sender.heads):
                ends, arrival = {sender.rank, int(head[TO])}, sender.numbers[slot, ARRIVAL]
                if arrival > self._engine.now and one in ends and (other is None or other in ends):
                    sender.numbers[slot, ARRIVAL] = max(arrival, until)
