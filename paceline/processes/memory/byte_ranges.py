"""The byte ranges of a message in shared memory: the tensors that its words name, or one server's shard of them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.processes.memory.call_codec import NOTHING, decode
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.memory.segment import Segment

Piece = tuple[int, int]  # offset and size in bytes
Pieces = Sequence[Piece]
Span = tuple[int, torch.dtype, tuple[int, ...]]  # a tensor in memory: offset, dtype and shape


@dataclass(frozen=True)
class ShardRange:
    """The index range [low, high) that one server holds of every vector of `length` numbers."""

    low: int
    high: int
    length: int
    lead: bool

    @classmethod
    def of(cls, memory: RunMemory, shard: int) -> ShardRange:
        low, high = memory.bounds(shard)
        return cls(low, high, memory.layout.notes["length"], shard == 0)

    @property
    def whole(self) -> bool:
        return self.high - self.low == self.length


def size_of(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """The size of a tensor in bytes."""
    return math.prod(shape) * dtype.itemsize


def of_words(words: Sequence[int], cutting: ShardRange) -> list[Piece]:
    """The byte ranges of the tensors that the words of a call or reply name; of vectors, this server's shard."""
    found: list[Span] = []

    def note(*span: Any) -> Tensor:
        found.append(span)
        return NOTHING

    decode(list(words), note)
    return of_spans(found, cutting)


def of_spans(spans: Iterable[Span], cutting: ShardRange) -> list[Piece]:
    """The byte ranges of tensors; of vectors, this server's shard."""
    if cutting.whole:
        return [(offset, math.prod(shape) * dtype.itemsize) for offset, dtype, shape in spans]
    return [piece for span in spans for piece in _pieces(*span, cutting)]


def _pieces(offset: int, dtype: torch.dtype, shape: tuple[int, ...], cutting: ShardRange) -> Iterable[Piece]:
    nbytes = size_of(dtype, shape)
    if not shape or shape[-1] != cutting.length:
        return [(offset, nbytes)]
    rows = nbytes // dtype.itemsize // cutting.length
    size = (cutting.high - cutting.low) * dtype.itemsize
    return [(offset + (row * cutting.length + cutting.low) * dtype.itemsize, size) for row in range(rows)]


def of_tensors(segment: Segment, tensors: Iterable[Tensor]) -> list[Piece]:
    """The byte ranges of tensors in a segment: one for each contiguous part."""
    found: list[Piece] = []
    for tensor in tensors:
        if not tensor.numel():
            continue
        if tensor.is_contiguous():
            offset = segment.offset(tensor)
            assert offset is not None
            found.append((offset, tensor.numel() * tensor.element_size()))
        else:
            found += of_tensors(segment, tensor.unbind(0))
    return found


class WritableRanges:
    """The byte ranges that a peer may write."""

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        self._spans = sorted((start, start + size) for start, size in spans)
        self._starts = [start for start, _ in self._spans]

    def __contains__(self, piece: tuple[int, int]) -> bool:
        return self.allows(*piece)

    def allows(self, offset: int, size: int) -> bool:
        at = bisect_right(self._starts, offset) - 1
        return at >= 0 and size >= 0 and offset + size <= self._spans[at][1]
