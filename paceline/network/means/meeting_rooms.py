"""Memory for what comes to a worker at a meeting over connections."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.network.means.group import HEAD, VectorPiece
from paceline.state import Vector


class MeetingRooms:
    """Memory for one meeting: the vectors of the members at the places `of`, which the worker keeps. Nothing is added
    up: what a mean needs for that is empty."""

    def __init__(self, like: Vector, size: int, of: Sequence[int]) -> None:
        self.rows = torch.empty((size, HEAD), dtype=torch.uint8)
        self.starts = [row.numpy().data for row in self.rows]
        self.vectors = {place: torch.empty_like(like) for place in of}
        self.whole = torch.empty(0, dtype=like.dtype)
        self.pieces: list[VectorPiece] = []
        self.mine: list[VectorPiece] = []
        self.sums: list[list[memoryview]] = []
        self.previews: list[memoryview] = []
