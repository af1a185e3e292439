"""The sum of vectors in shared memory, added in the order of ranks, in blocks that stay in a core's cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.processes.memory.segment import Segment
from paceline.state import Vector, mean_into

BLOCK = 512 << 10  # bytes of a sum that stay in a core's cache while vectors are added to it; also of those that the
# allocator keeps by itself, so that new memory costs nothing


class VectorSum:
    """Vectors at certain offsets. The means of a run are nearly all of the same few: their views are made once, because
    views made in every mean, with cold caches, would take as long as the sum."""

    def __init__(self, segment: Segment, dtype: torch.dtype, count: int, places: Sequence[int], own: int) -> None:
        """`own`: which of the vectors is this worker's; the sum is computed where that one is."""
        self._segment, self._dtype, self._count, self.places = segment, dtype, count, places
        self.device = self.view(places[own], 0, count).device
        self._on_cpu = self.device.type == "cpu"
        self._blocks: dict[tuple[int, int], list[tuple[int, int, list[Vector]]]] = {}

    def view(self, place: int, low: int, high: int) -> Vector:
        """Some numbers of a vector at an offset."""
        return self._segment.tensor(place + low * self._dtype.itemsize, self._dtype, (high - low,))

    def mean(self, low: int, high: int, weights: Sequence[float] | None, out: Vector | None) -> Vector:
        """A part of the mean, written to `out`, or to new memory if it is small. `weights`: None if all are 1."""
        blocks = self._blocks.get((low, high)) or self._parted(low, high)
        if len(blocks) == 1:
            add_up = mean_into if self._on_cpu else self._add_up
            return add_up(out, blocks[0][2], weights)
        assert out is not None
        for start, end, vectors in blocks:
            self._add_up(out[start:end], vectors, weights)
        return out

    def _parted(self, low: int, high: int) -> list[tuple[int, int, list[Vector]]]:
        step = BLOCK // self._dtype.itemsize if self._on_cpu else high - low
        made = self._blocks[low, high] = [
            (start - low, end - low, [self.view(place, start, end) for place in self.places])
            for start in range(low, max(high, low + 1), max(step, 1))
            for end in [min(start + step, high)]
        ]
        return made

    def _add_up(self, out: Vector | None, vectors: list[Vector], weights: Sequence[float] | None) -> Vector:
        device = self.device
        if self._on_cpu or all(one.device == device for one in vectors):
            here = out is None or out.device == device
            found = mean_into(out if here else None, vectors, weights)
        else:  # others are on other GPUs
            found = mean_into(None, [vector.to(device) for vector in vectors], weights)
        return found if out is None or found is out else out.copy_(found)
