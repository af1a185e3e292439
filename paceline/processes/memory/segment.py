"""Memory that processes share: anonymous segments, and named tensors laid out in them.

A segment is a memfd: it has no name in any file system and is gone with the last process that holds it, however that
process ends. Pages that nobody has written take no memory, so areas may be laid out generously.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import RunError

ALIGN = 64  # as torch's own allocator: the same alignment gives the same bits
HEAD = 1 << 20  # the layout itself stands at the front
WORD = 8
KNOWN = 1024  # views that are remembered: making one costs more than a small copy


class Segment:
    """One mapping of shared memory."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size = descriptor, size
        self.memory = mmap.mmap(descriptor, size)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.base = self.bytes.data_ptr()
        self.words = memoryview(self.memory).cast("q")
        self.floats = memoryview(self.memory).cast("d")
        self._known: dict[tuple[int, torch.dtype, tuple[int, ...]], Tensor] = {}

    def offset(self, tensor: Tensor) -> int | None:
        """Where a tensor lies in here; None if it lies elsewhere or not in one piece."""
        if tensor.device.type != "cpu":
            return None
        place = tensor.data_ptr() - self.base
        return place if 0 <= place < self.size and tensor.is_contiguous() else None

    def tensor(self, offset: int, dtype: torch.dtype, shape: Iterable[int]) -> Tensor:
        """The tensor that lies there, not copied; the same object each time, as long as it is not forgotten."""
        key = (offset, dtype, tuple(shape))
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= KNOWN:
                self._known.clear()
            found = self._known[key] = self._view(*key)
        return found

    def _view(self, offset: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> Tensor:
        count = 1
        for size in sizes:
            count *= size
        if not count:
            return torch.empty(sizes, dtype=dtype)
        if offset < 0 or offset + count * dtype.itemsize > self.size:
            raise RunError(f"a tensor of shape {sizes} at {offset} reaches beyond the shared memory")
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset).view(sizes)


def anonymous(name: str, size: int = 0) -> int:
    """The descriptor of a new segment."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    if size:
        os.ftruncate(descriptor, size)
    return descriptor


@dataclass(frozen=True)
class TensorPlace:
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Layout:
    """Which tensor lies where; whoever lays it out writes it down at the front, the others read it there."""

    def __init__(self) -> None:
        self.places: dict[str, TensorPlace] = {}
        self.size = HEAD
        self.notes: dict[str, Any] = {}

    def add(self, name: str, shape: Iterable[int], dtype: torch.dtype) -> None:
        place = TensorPlace(self.size, dtype, tuple(shape))
        count = 1
        for size in place.shape:
            count *= size
        self.places[name] = place
        self.size += -(-max(count * dtype.itemsize, 1) // ALIGN) * ALIGN

    def like(self, name: str, tensor: Tensor) -> None:
        self.add(name, tensor.shape, tensor.dtype)

    def write(self, segment: Segment) -> None:
        places = {
            name: [place.offset, str(place.dtype).removeprefix("torch."), list(place.shape)]
            for name, place in self.places.items()
        }
        text = json.dumps({"places": places, "notes": self.notes, "size": self.size}).encode()
        if len(text) > HEAD - WORD:
            raise RunError(f"{len(self.places)} cells are too many to lay out in shared memory")
        segment.memory[WORD : WORD + len(text)] = text
        segment.words[0] = len(text)

    @classmethod
    def read(cls, segment: Segment) -> Layout:
        text = segment.memory[WORD : WORD + segment.words[0]]
        described = json.loads(text)
        layout = cls()
        layout.size, layout.notes = described["size"], described["notes"]
        layout.places = {
            name: TensorPlace(offset, getattr(torch, dtype), tuple(shape))
            for name, (offset, dtype, shape) in described["places"].items()
        }
        return layout

    def tensor(self, segment: Segment, name: str) -> Tensor:
        place = self.places[name]
        return segment.tensor(place.offset, place.dtype, place.shape)

    def under(self, segment: Segment, prefix: str) -> dict[str, Tensor]:
        """All tensors whose names begin so, under the rest of their names."""
        names = [name for name in self.places if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.tensor(segment, name) for name in names}
