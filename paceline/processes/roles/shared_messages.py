"""A worker's messages to others: those of its own node read them in shared memory, in cells of their senders; those of
other nodes get copies over connections."""

from __future__ import annotations

from contextlib import suppress
from typing import Protocol

from paceline.ops import PeerMessage, Send
from paceline.processes.calls.client import RolledBack, Stopped
from paceline.processes.memory.board import GOAL
from paceline.processes.memory.payload_codec import to_bytes
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.transport import RemoteMessages, WaitFor
from paceline.runs.order_log import OrderLogWriter, RecordKind
from paceline.runtime.messages import NEVER, MessageCells, arrived, free_slot

SENT, RECEIVED, TAKEN = RecordKind.SENT, RecordKind.RECEIVED, RecordKind.TAKEN
REFUSED = -1  # in place of the slot of a message


class WaitsOfMessages(Protocol):
    """What a worker's messages need of its waits."""

    generation: int

    @property
    def wait_for(self) -> WaitFor: ...


class SharedMessages:
    """One worker's messages. Its log has what became of each message that it sent, and which ones it has taken."""

    def __init__(self, memory: RunMemory, rank: int, waits: WaitsOfMessages, remote: RemoteMessages | None) -> None:
        """`remote`: messages to and from workers of other nodes; None: all share this memory."""
        self._memory, self._board, self._rank, self._waits = memory, memory.board, rank, waits
        self._remote = remote if memory.node.secret is not None else None
        self._cells = [MessageCells(r, memory.worker_state(r)) for r in range(memory.plan.workers)]
        self._own = self._cells[rank]
        self.journal: OrderLogWriter | None = None

    def cells(self, rank: int) -> MessageCells:
        if self._remote is None or self._memory.beside(rank):
            return self._cells[rank]
        return self._remote.cells(rank)

    def finished(self, rank: int) -> int:
        """The steps that a worker has finished; nothing unfinished comes from another node. The cells of a worker that
        has still to return to the checkpoint say nothing."""
        if self._remote is not None and not self._memory.beside(rank):
            return NEVER
        steps: int = self._board.t[rank]
        return steps if self._board.followed[rank] == self._waits.generation else 0

    def arrived(self, sender: int, slot: int) -> bool:
        return True

    def begin_step(self) -> None:
        if self._remote is not None:
            self._remote.begin_step()

    def end_step(self, step: int) -> None:
        """A step is finished: others see its messages, on this node from the word on the board."""
        if self._remote is not None:
            self._remote.end_step(step)

    def settle(self) -> None:
        """This worker leaves while the others train: wait until those of other nodes have taken its messages, which
        they do not find in shared memory afterwards."""
        remote = self._remote
        if remote is not None:
            with suppress(Stopped, RolledBack):
                self._waits.wait_for(lambda: not remote.unsettled(self._reads), "others to take its last messages")

    def send(self, op: Send) -> bool:
        board, cut = self._board, self._board.saved[self._rank]
        slot = free_slot(self, self._own, cut) if self._reads(op.to) else None
        if self.journal is not None:
            self.journal.add(SENT, REFUSED if slot is None else slot)
        if slot is None:
            return False
        self._own.put(slot, op, board.t[self._rank], cut)
        if self._remote is not None and op.packed is not None and not self._memory.beside(op.to):
            self._remote.packed(slot, to_bytes(op.packed.payloads[0]))
        return True

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
        return tuple([self._own.take(place, self.cells(place.sender), step, cut) for place in places])
