"""Messages between workers of one machine: they are in shared memory, in cells of their senders."""

from __future__ import annotations

from paceline.ops import PeerMessage, Send
from paceline.processes.memory.board import GOAL
from paceline.processes.memory.run_memory import RunMemory
from paceline.runs.order_log import OrderLogWriter, RecordKind
from paceline.runtime.messages import MessageCells, arrived, free_slot

SENT, RECEIVED, TAKEN = RecordKind.SENT, RecordKind.RECEIVED, RecordKind.TAKEN
REFUSED = -1  # in place of the slot of a message


class SharedMessages:
    """One worker's messages. Its log has what became of each message that it sent, and which ones it has taken."""

    def __init__(self, memory: RunMemory, rank: int) -> None:
        self._memory, self._board, self._rank = memory, memory.board, rank
        self._cells = [MessageCells(r, memory.worker_state(r)) for r in range(memory.plan.workers)]
        self._own = self._cells[rank]
        self.journal: OrderLogWriter | None = None

    def cells(self, rank: int) -> MessageCells:
        return self._cells[rank]

    def finished(self, rank: int) -> int:
        steps: int = self._board.t[rank]
        return steps

    def arrived(self, sender: int, slot: int) -> bool:
        return True

    def send(self, op: Send) -> bool:
        board, cut = self._board, self._board.saved[self._rank]
        slot = free_slot(self, self._own, cut) if self._reads(op.to) else None
        if self.journal is not None:
            self.journal.add(SENT, REFUSED if slot is None else slot)
        if slot is not None:
            self._own.put(slot, op, board.t[self._rank], cut)
        return slot is not None

    def _reads(self, rank: int) -> bool:
        """Whether a worker is alive and has steps to make."""
        board, goal = self._board, self._board.run[GOAL]
        return bool(board.alive[rank] and not board.parted[rank] and not 0 <= goal <= self._memory.versions()[rank])

    def receive(self) -> tuple[PeerMessage, ...]:
        step, cut = self._board.t[self._rank], self._board.saved[self._rank]
        places = arrived(self, self._own, range(len(self._cells)), cut)
        if self.journal is not None:
            self.journal.add(RECEIVED, len(places))
            for place in places:
                self.journal.add(TAKEN, *place)
        return tuple([self._own.take(place, self._cells[place.sender], step, cut) for place in places])
