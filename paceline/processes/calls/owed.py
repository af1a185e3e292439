"""Answers that lie in the server's state itself, and not in the lane of the worker of another node that asked.

What such a worker gets is sent, so a copy is needed only if the state changes before the worker has it for certain: it
may ask again after its connection broke. With each call a worker says which answers it still waits for.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from paceline.processes.calls.mailbox import Mailbox
from paceline.processes.memory.run_memory import RunMemory

LARGE = 1 << 15  # bytes; what is smaller is copied at once


class PendingReplies:
    """One server's account. It lies in memory, so that a successor finds it."""

    def __init__(self, stage: RunMemory, shard: int, lanes: list[Mailbox]) -> None:
        self._segment = stage.segment
        first = stage.layout.places["owed"].offset // 8 + 3 * len(lanes) * shard
        self._rows = stage.segment.words[first : first + 3 * len(lanes)]  # where it lies, where it is to lie, its size
        self._posted, self._answered = stage.board.posted, stage.board.answered[shard]
        state = stage.shard_state(shard)
        self._cells = {stage.segment.offset(state.cell(name)) for name in state} - {None}
        self._lanes = [lane for lane in lanes if self._rows[3 * lane.index]]

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def of(self, lane: Mailbox) -> tuple[int, int, int] | None:
        """Where a lane's answer lies, where in the lane it belongs, and its size."""
        source, at, size = self._rows[3 * lane.index : 3 * lane.index + 3]
        return (source, at, size) if source else None

    def note(self, lane: Mailbox, tensor: Tensor, at: int) -> bool:
        """A part of an answer belongs there. False: it must be copied; True: it may stay where it is for now."""
        size = tensor.numel() * tensor.element_size()
        source = self._segment.offset(tensor) if size >= LARGE else None
        if source is None or source not in self._cells or lane in self._lanes:
            return False
        row = 3 * lane.index
        self._rows[row + 1], self._rows[row + 2], self._rows[row] = at, size, source
        self._lanes.append(lane)
        return True

    def had(self, rank: int, missing: int) -> None:
        """A worker has the answers in its lanes, but for some: a bit for each."""
        for lane in [lane for lane in self._lanes if lane.rank == rank and not missing >> lane.number & 1]:
            self._lanes.remove(lane)
            self._rows[3 * lane.index] = 0

    def settle(self) -> Iterator[tuple[Mailbox, int, int, int]]:
        """The state is about to change: copy what may still be wanted. Gives each with its new place."""
        memory = memoryview(self._segment.memory)
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            source, at, size = self._rows[3 * lane.index : 3 * lane.index + 3]
            if self._posted[lane.index] == self._answered[lane.index]:
                memory[at : at + size] = memory[source : source + size]
                yield lane, source, at, size
            self._rows[3 * lane.index] = 0
