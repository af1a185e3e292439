"""Messages between workers that nobody waits for. A message is in cells of its sender until its receiver has taken it.

A worker has `MESSAGES` slots for messages under way. The head of a slot says who the message is for, and in which step
it was sent; the receiver notes in a cell of its own which message of each slot it has taken. Both count when the step
is finished in which they were written: a step that is never finished has neither sent nor taken anything. So what a
worker has given away and what it has kept agree, whenever a process is killed.

Each cell has one writer, and others read it meanwhile. The number of the step is made invalid first and written last:
who reads the same valid step before and after the rest has read a whole row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from torch import Tensor

from paceline.ops import MESSAGE_CELLS, MESSAGES, PeerMessage, Send
from paceline.state import State

# columns of a head; of a note that a message is taken, the first three. CUT: the number of the last checkpoint that the
# writer had taken part in. What comes after a checkpoint is not seen before it.
STEP, SEQUENCE, CUT, TO = range(4)
NUMBER, ARRIVAL = range(2)  # columns of the numbers; the arrival is a virtual time
NEVER = 1 << 62  # no step

Rows = np.ndarray[Any, Any]


class Place(NamedTuple):
    """Where a message is, and its number among those that have been there."""

    sender: int
    slot: int
    sequence: int


class MessageCells:
    """The cells of one worker."""

    def __init__(self, rank: int, state: State) -> None:
        self.rank = rank
        vectors, numbers, heads, taken = (state.cell(name) for name in MESSAGE_CELLS)
        self.vectors: Tensor | list[Tensor] = vectors
        self.numbers, self.heads, self.taken = numbers.numpy(), heads.numpy(), taken.numpy()

    @classmethod
    def over(cls, rank: int, vectors: list[Tensor], numbers: Rows, heads: Rows, taken: Rows) -> Self:
        """Copies of the cells of a worker whose memory is not seen from here."""
        made = cls.__new__(cls)
        made.rank, made.vectors, made.numbers, made.heads, made.taken = rank, vectors, numbers, heads, taken
        return made

    def put(self, slot: int, op: Send, step: int, cut: int) -> None:
        """Write a message; it can be seen when the step is finished."""
        head = self.heads[slot]
        head[STEP] = NEVER
        self.vectors[slot].copy_(op.v)
        self.numbers[slot] = op.number, 0.0
        head[SEQUENCE] += 1
        head[CUT], head[TO] = cut, op.to
        head[STEP] = step

    def take(self, place: Place, sender: MessageCells, step: int, cut: int) -> PeerMessage:
        """Copy a message, and note that it is taken."""
        message = PeerMessage(
            place.sender, sender.vectors[place.slot].clone(), float(sender.numbers[place.slot, NUMBER])
        )
        note = self.taken[place.sender * MESSAGES + place.slot]
        note[STEP] = NEVER
        note[SEQUENCE], note[CUT] = place.sequence, cut
        note[STEP] = step
        return message

    def sent_in(self, step: int) -> list[int]:
        """The places of messages that were sent in a step."""
        return np.flatnonzero(self.heads[:, STEP] == step).tolist() if self.heads[:, SEQUENCE].any() else []


class Workers(Protocol):
    """What a worker knows of all workers when it sends or receives."""

    def cells(self, rank: int) -> MessageCells: ...

    def finished(self, rank: int) -> int:
        """The steps that a worker has finished."""

    def arrived(self, sender: int, slot: int) -> bool:
        """Whether the message has had time to arrive."""


def free_slot(workers: Workers, own: MessageCells, cut: int) -> int | None:
    """A place whose message has been taken, or that never had one; None: all messages are under way."""
    for slot, (_, sequence, _, to) in enumerate(own.heads.tolist()):
        if not sequence:
            return slot
        note = workers.cells(to).taken[own.rank * MESSAGES + slot]
        step = note[STEP]
        number, seen = note[SEQUENCE], note[CUT]
        if step == note[STEP] and step < workers.finished(to) and number == sequence and seen <= cut:
            return slot
    return None


def arrived(workers: Workers, own: MessageCells, ranks: Sequence[int], cut: int) -> list[Place]:
    """The messages for a worker that it has not taken: by the ranks of their senders, then as they were sent."""
    found: list[tuple[int, int, Place]] = []
    for rank in ranks:
        heads = workers.cells(rank).heads
        if rank == own.rank or not (heads[:, TO] == own.rank).any():
            continue
        for slot, head in enumerate(heads):
            step = head[STEP]
            sequence, seen, to = int(head[SEQUENCE]), head[CUT], head[TO]
            if step != head[STEP] or step >= workers.finished(rank) or to != own.rank or seen > cut:
                continue
            taken = own.taken[rank * MESSAGES + slot, SEQUENCE]
            if sequence > taken and workers.arrived(rank, slot):
                found.append((rank, int(step), Place(rank, slot, sequence)))
    return [place for _, _, place in sorted(found)]


def under_way(states: Sequence[State]) -> list[tuple[int, PeerMessage]]:
    """All messages that were sent and not taken, each with the rank that it is for. No worker may be inside a step."""
    cells = [MessageCells(rank, state) for rank, state in enumerate(states)]
    found = []
    for sender in cells:
        for slot, (_, sequence, _, to) in enumerate(sender.heads.tolist()):
            if sequence > cells[to].taken[sender.rank * MESSAGES + slot, SEQUENCE]:
                number = float(sender.numbers[slot, NUMBER])
                found.append((to, PeerMessage(sender.rank, sender.vectors[slot].clone(), number)))
    return found


def restore_rows(rows: Rows, saved: Rows) -> None:
    """Set heads or notes back while other processes may read them."""
    for row, before in zip(rows, saved, strict=True):
        if (row != before).any():
            row[STEP] = NEVER
            row[STEP + 1 :] = before[STEP + 1 :]
            row[STEP] = before[STEP]
