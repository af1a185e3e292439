"""Memory for what comes to a worker at a mean over connections, and vectors as bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.network.means.group import HEAD, pieces
from paceline.state import Vector

SMALL = 2 << 20  # bytes of all vectors together up to which every member adds them up itself
SLICE = 1 << 20  # bytes of a message of a large vector


class Rooms:
    """Memory for means of vectors of one length. It is used again for every such mean. `gather`: all members get all
    vectors, however large."""

    def __init__(self, like: Vector, size: int, place: int, *, gather: bool) -> None:
        length = like.numel() * like.element_size()
        self.small = length * size <= SMALL
        held = self.small or gather
        self.rows = torch.empty((size, HEAD + (-(-length // HEAD) * HEAD if held else 0)), dtype=torch.uint8)
        self.starts = [as_bytes(row)[: HEAD + (length if self.small else 0)] for row in self.rows]
        self.pieces = [] if held else pieces(like, size, place, SLICE * size, backwards=True)
        self.previews = [memoryview(bytearray(HEAD)) for _ in range(size)]
        self.mine = [piece for piece in self.pieces if piece.cut[place]]  # that this member adds up
        theirs = [[piece for piece in self.pieces if piece.cut[other]] for other in range(size)]
        self.whole = torch.empty(0 if held else like.numel(), dtype=like.dtype)
        # where slices of each member's vector go, and its slices of the mean
        self.parts = [[as_bytes(piece.slices[other]) for piece in self.mine] for other in range(size)]
        if gather and not self.small:
            self.parts = [slices(row[HEAD : HEAD + length]) for row in self.rows]
        self.sums = [[as_bytes(piece.slice_of(self.whole, k)) for piece in theirs[k]] for k in range(size)]


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a tensor without gaps."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def slices(tensor: Tensor) -> list[memoryview]:
    """The memory of a tensor, a message each."""
    data = as_bytes(tensor)
    return [data[low : low + SLICE] for low in range(0, data.nbytes, SLICE)]
