"""Results that are not copied on their way from a server to a worker of another node.

`PendingReplies`: a server sends its state itself. A copy is needed only if the state changes before the worker has the
reply for certain: the worker may ask again after its connection broke. With each call a worker says which replies it
still waits for.

`ReceiveBuffer`: the worker receives a result where the result is to stay, instead of in its mailbox.

`BufferPool`: memory for results that a worker gets again and again. The system clears every page of a large block that
it hands out: for a vector of 40 MB that takes longer than to copy it. So a block is used again once no tensor is in it.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.processes.calls.mailbox import Mailbox
from paceline.processes.memory.byte_ranges import Piece, Pieces
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.memory.segment import Segment

LARGE = 1 << 15  # bytes; what is smaller is copied at once
SMALLEST = 1 << 18  # bytes; what is smaller the allocator keeps by itself
BLOCKS = 3  # that are kept: the result before the last may still be held while the next comes


class PendingReplies:
    """One server's account. It lies in memory, so that a successor finds it."""

    def __init__(self, memory: RunMemory, shard: int, mailboxes: list[Mailbox]) -> None:
        self._segment = memory.segment
        first = memory.layout.places["owed"].offset // 8 + 3 * len(mailboxes) * shard
        self._rows = memory.segment.words[
            first : first + 3 * len(mailboxes)
        ]  # where it lies, where it is to lie, its size
        self._posted, self._answered = memory.board.posted, memory.board.answered[shard]
        state = memory.shard_state(shard)
        self._cells = {memory.segment.offset(state.cell(name)) for name in state} - {None}
        self._mailboxes = [mailbox for mailbox in mailboxes if self._rows[3 * mailbox.index]]

    def __bool__(self) -> bool:
        return bool(self._mailboxes)

    def of(self, mailbox: Mailbox) -> tuple[int, int, int] | None:
        """Where a lane's answer lies, where in the lane it belongs, and its size."""
        source, at, size = self._rows[3 * mailbox.index : 3 * mailbox.index + 3]
        return (source, at, size) if source else None

    def note(self, mailbox: Mailbox, tensor: Tensor, at: int) -> bool:
        """A part of an answer belongs there. False: it must be copied; True: it may stay where it is for now."""
        size = tensor.numel() * tensor.element_size()
        source = self._segment.offset(tensor) if size >= LARGE else None
        if source is None or source not in self._cells or mailbox in self._mailboxes:
            return False
        row = 3 * mailbox.index
        self._rows[row + 1], self._rows[row + 2], self._rows[row] = at, size, source
        self._mailboxes.append(mailbox)
        return True

    def had(self, rank: int, missing: int) -> None:
        """A worker has the answers in its lanes, but for some: a bit for each."""
        for mailbox in [
            mailbox for mailbox in self._mailboxes if mailbox.rank == rank and not missing >> mailbox.number & 1
        ]:
            self._mailboxes.remove(mailbox)
            self._rows[3 * mailbox.index] = 0

    def settle(self) -> Iterator[tuple[Mailbox, int, int, int]]:
        """The state is about to change: copy what may still be wanted. Gives each with its new place."""
        memory = memoryview(self._segment.memory)
        mailboxes, self._mailboxes = self._mailboxes, []
        for mailbox in mailboxes:
            source, at, size = self._rows[3 * mailbox.index : 3 * mailbox.index + 3]
            if self._posted[mailbox.index] == self._answered[mailbox.index]:
                memory[at : at + size] = memory[source : source + size]
                yield mailbox, source, at, size
            self._rows[3 * mailbox.index] = 0


@dataclass(slots=True)
class ReceiveBuffer:
    """Memory that a result is received into, to stay there: a block instead of a part of a lane."""

    at: int
    size: int
    block: mmap.mmap
    tensor: Tensor  # that lies there
    came: dict[int, Pieces] = field(default_factory=dict)  # by server: what it has put there

    def is_for(self, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
        return self.at == at and self.tensor.dtype is dtype and self.tensor.shape == shape

    def holds(self, piece: Piece) -> bool:
        offset, size = piece
        return self.at <= offset and offset + size <= self.at + self.size

    def view(self, piece: Piece) -> memoryview:
        offset, size = piece
        return memoryview(self.block)[offset - self.at : offset - self.at + size]

    def put_back(self, segment: Segment) -> None:
        """It is another result after all: let it lie in its lane."""
        for piece in (piece for pieces in self.came.values() for piece in pieces):
            segment.memory[piece[0] : piece[0] + piece[1]] = self.view(piece)


def over(block: mmap.mmap, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """What lies in a block. A view of it, or what autograd has saved of it, holds the block as well."""
    return torch.frombuffer(block, dtype=dtype).view(shape)


class BufferPool:
    """Copies of tensors, in blocks that are used again."""

    def __init__(self) -> None:
        self._blocks: list[mmap.mmap] = []

    def copy(self, tensor: Tensor) -> Tensor:
        size = tensor.numel() * tensor.element_size()
        if size < SMALLEST:
            return tensor.clone()
        return over(self.block(size), tensor.dtype, tuple(tensor.shape)).copy_(tensor)

    def block(self, size: int) -> mmap.mmap:
        """One of so many bytes in which nothing lies."""
        block = self._free(size)
        if block is None:
            block = mmap.mmap(-1, size)
            self._blocks = [*self._blocks[1 - BLOCKS :], block]
        return block

    def _free(self, size: int) -> mmap.mmap | None:
        for number in range(len(self._blocks)):
            # held by the list alone, and by the call that counts
            if sys.getrefcount(self._blocks[number]) == 2 and len(self._blocks[number]) == size:
                return self._blocks[number]
        return None
