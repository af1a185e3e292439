"""Where a worker receives a result from another node: in its lane, or at once where the result is to stay."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.processes.memory.byte_ranges import Piece, Pieces
from paceline.processes.memory.segment import Segment


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
