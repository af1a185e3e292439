"""Memory for results that a worker gets again and again.

The system clears every page of a large block that it hands out, page by page as they are touched: for a vector of 40 MB
that takes longer than to copy it. So a block is used again, once no tensor lies in it any more.
"""

from __future__ import annotations

import mmap
import sys

import torch
from torch import Tensor

SMALLEST = 1 << 18  # bytes; what is smaller the allocator keeps by itself
BLOCKS = 3  # that are kept: the result before the last may still be held while the next comes


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
