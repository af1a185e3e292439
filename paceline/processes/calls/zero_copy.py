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
BLOCKS = 3  # blocks in a pool: a worker may still hold the last two results when the next arrives


class PendingReplies:
    """Replies not yet copied out of a server's state. Kept in shared memory for a restarted server."""

    def __init__(self, memory: RunMemory, shard: int, mailboxes: list[Mailbox]) -> None:
        self._segment = memory.segment
        first = memory.layout.places["owed"].offset // 8 + 3 * len(mailboxes) * shard
        # per mailbox: the reply's offset in the state, its offset in the mailbox, its size
        self._rows = memory.segment.words[first : first + 3 * len(mailboxes)]
        self._posted, self._answered = memory.board.posted, memory.board.answered[shard]
        state = memory.shard_state(shard)
        self._cells = {memory.segment.offset(state.cell(name)) for name in state} - {None}
        self._mailboxes = [mailbox for mailbox in mailboxes if self._rows[3 * mailbox.index]]

    def __bool__(self) -> bool:
        return bool(self._mailboxes)

    def of(self, mailbox: Mailbox) -> tuple[int, int, int] | None:
        """A pending reply's offset in the state, its offset in the mailbox, and its size."""
        source, at, size = self._rows[3 * mailbox.index : 3 * mailbox.index + 3]
        return (source, at, size) if source else None

    def note(self, mailbox: Mailbox, tensor: Tensor, at: int) -> bool:
        """A tensor of a reply, which belongs at offset `at`. True: it is sent from the state; False: copy it now."""
        size = tensor.numel() * tensor.element_size()
        source = self._segment.offset(tensor) if size >= LARGE else None
        if source is None or source not in self._cells or mailbox in self._mailboxes:
            return False
        row = 3 * mailbox.index
        self._rows[row + 1], self._rows[row + 2], self._rows[row] = at, size, source
        self._mailboxes.append(mailbox)
        return True

    def had(self, rank: int, missing: int) -> None:
        """A worker has received its replies, except those in the mailboxes whose bits are set in `missing`."""
        for mailbox in list(self._mailboxes):
            if mailbox.rank == rank and not missing >> mailbox.number & 1:
                self._mailboxes.remove(mailbox)
                self._rows[3 * mailbox.index] = 0

    def settle(self) -> Iterator[tuple[Mailbox, int, int, int]]:
        """The state is about to change: copy the replies that were not received yet. Gives each mailbox with source,
        offset and size."""
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
    """A block that a result is received into and stays in, instead of the mailbox."""

    at: int
    size: int
    block: mmap.mmap
    tensor: Tensor  # the result
    came: dict[int, Pieces] = field(default_factory=dict)  # by server: the byte ranges that it has sent

    def is_for(self, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
        return self.at == at and self.tensor.dtype is dtype and self.tensor.shape == shape

    def holds(self, piece: Piece) -> bool:
        offset, size = piece
        return self.at <= offset and offset + size <= self.at + self.size

    def view(self, piece: Piece) -> memoryview:
        offset, size = piece
        return memoryview(self.block)[offset - self.at : offset - self.at + size]

    def put_back(self, segment: Segment) -> None:
        """The result is not the expected one: copy it to the mailbox."""
        for pieces in self.came.values():
            for offset, size in pieces:
                segment.memory[offset : offset + size] = self.view((offset, size))


def over(block: mmap.mmap, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor over a block. Its views, and what autograd has saved of it, keep the block in use."""
    return torch.frombuffer(block, dtype=dtype).view(shape)


class BufferPool:
    """Copies of tensors, in blocks that are used again."""

    def __init__(self) -> None:
        self._blocks: list[mmap.mmap] = []

    def copy(self, tensor: Tensor) -> Tensor:
        return self.room_for(tensor).copy_(tensor)

    def room_for(self, tensor: Tensor) -> Tensor:
        """A tensor to copy this one to."""
        size = tensor.numel() * tensor.element_size()
        if size < SMALLEST:
            return torch.empty_like(tensor, memory_format=torch.contiguous_format)
        return over(self.block(size), tensor.dtype, tuple(tensor.shape))

    def block(self, size: int) -> mmap.mmap:
        """A block of `size` bytes that no tensor uses."""
        for number in range(len(self._blocks)):  # by number: a variable would be one more reference
            # held by the list alone, and by the call that counts
            if sys.getrefcount(self._blocks[number]) == 2 and len(self._blocks[number]) == size:
                return self._blocks[number]
        self._blocks = [*self._blocks[1 - BLOCKS :], mmap.mmap(-1, size)]
        return self._blocks[-1]
