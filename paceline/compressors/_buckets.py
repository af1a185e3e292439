"""A vector in buckets of equal length, each with a scale of its own."""

from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.state import Vector

BLOCK = 1 << 17  # numbers


def buckets(v: Vector, length: int) -> Tensor:
    """The vector in rows of this length, with zeros after its end; 0: one row."""
    length = min(length or v.numel(), v.numel())
    short = -v.numel() % length
    padded = torch.cat((v, v.new_zeros(short))) if short else v
    return padded.view(-1, length)


def blocks(rows: Tensor) -> Iterator[slice]:
    """Ranges of rows that fit in a cache: several passes over a block are faster than each over the whole vector."""
    each = max(BLOCK // rows.shape[1], 1)
    for low in range(0, rows.shape[0], each):
        yield slice(low, low + each)


def joined(rows: Tensor, like: Vector) -> Vector:
    """The vector that `buckets` has split."""
    return rows.reshape(-1)[: like.numel()]
