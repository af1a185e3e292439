"""Memory that processes share: anonymous segments, and named tensors laid out in them.

A segment is a memfd: it has no name in any file system, and the kernel frees it with the last process that has it
open, however that process ends. Pages that were never written take no memory, so areas may be large.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.errors import RunError
from paceline.processes.memory import gpu_memory
from paceline.processes.memory.gpu_memory import GpuMemory

ALIGN = 64  # as torch's own allocator: the same alignment gives the same bits
HEAD = 1 << 20  # bytes at the start of a segment, for the layout itself
WORD = 8
KNOWN = 1024  # cached views: making a view costs more than a small copy
PAGE = mmap.PAGESIZE
LARGE = 1 << 20  # bytes of a tensor that begins and ends with a page: a GPU copies from and to it directly


class Segment:
    """One mapping of shared memory. Offsets from `gpu_memory.FIRST` on are addresses in the memory of GPUs."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size = descriptor, size
        self.gpus: GpuMemory | None = None
        self.memory = mmap.mmap(descriptor, size)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.base = self.bytes.data_ptr()
        self.words = memoryview(self.memory).cast("q")
        self.floats = memoryview(self.memory).cast("d")
        self._known: dict[tuple[int, torch.dtype, tuple[int, ...]], Tensor] = {}
        self._pinned: set[int] = set()

    def offset(self, tensor: Tensor) -> int | None:
        """The offset of a contiguous tensor of this segment; None for any other tensor."""
        if tensor.device.type != "cpu":
            return None if self.gpus is None else self.gpus.place(tensor)
        place = tensor.data_ptr() - self.base
        return place if 0 <= place < self.size and tensor.is_contiguous() else None

    def pin(self, offset: int, nbytes: int) -> bool:
        """Have a GPU copy directly from and to a large tensor of the host, from now on: four times as fast. False if
        the driver does not allow it, or the tensor is small."""
        if nbytes < LARGE or offset % PAGE or offset >= gpu_memory.FIRST:
            return False
        if offset not in self._pinned:
            if not gpu_memory.registered(self.base + offset, aligned(nbytes, PAGE)):
                return False
            self._pinned.add(offset)
        return True

    def release(self, offset: int, nbytes: int) -> bool:
        """Give the memory of a large tensor back to the system: it reads as zeros until it is written again. False if
        the tensor is small, or in the memory of a GPU, or a GPU copies from it."""
        first, last = aligned(offset, PAGE), (offset + nbytes) // PAGE * PAGE
        if nbytes < LARGE or offset >= gpu_memory.FIRST or offset in self._pinned:
            return False
        self.memory.madvise(mmap.MADV_REMOVE, first, last - first)
        return True

    def tensor(self, offset: int, dtype: torch.dtype, shape: Iterable[int]) -> Tensor:
        """A view of the tensor at an offset; the same object each time, while it is cached."""
        key = (offset, dtype, tuple(shape))
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= KNOWN:
                self._known.clear()
            found = self._known[key] = self._view(*key)
        return found

    def _view(self, offset: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> Tensor:
        count = math.prod(sizes)
        if self.gpus is not None and offset >= gpu_memory.FIRST:
            return self.gpus.tensor(offset, dtype, sizes)
        if not count:
            return torch.empty(sizes, dtype=dtype)
        if offset < 0 or offset + count * dtype.itemsize > self.size:
            raise RunError(f"a tensor of shape {sizes} at {offset} reaches beyond the shared memory")
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset).view(sizes)


def aligned(number: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-number // unit) * unit


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

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Layout:
    """The offset of each tensor by name. The chief writes it at the start of the segment, the others read it there."""

    def __init__(self) -> None:
        self.places: dict[str, TensorPlace] = {}
        self.size = HEAD
        self.gpus: dict[int, int] = {}  # bytes on each GPU, by its number
        self.notes: dict[str, Any] = {}

    def add(self, name: str, shape: Iterable[int], dtype: torch.dtype, gpu: int | None = None) -> None:
        """Place a tensor in shared memory of the host, or of a GPU."""
        place = TensorPlace(0, dtype, tuple(shape))
        if gpu is None:
            unit = PAGE if place.nbytes >= LARGE else ALIGN
            offset = aligned(self.size, unit)
            self.size = offset + aligned(max(place.nbytes, 1), unit)
        else:
            offset = gpu_memory.address(gpu, self.gpus.get(gpu, 0))
            self.gpus[gpu] = self.gpus.get(gpu, 0) + aligned(max(place.nbytes, 1), gpu_memory.ALIGN)
        self.places[name] = replace(place, offset=offset)

    def like(self, name: str, tensor: Tensor, gpu: int | None = None) -> None:
        self.add(name, tensor.shape, tensor.dtype, gpu)

    def write(self, segment: Segment) -> None:
        places = {
            name: [place.offset, str(place.dtype).removeprefix("torch."), list(place.shape)]
            for name, place in self.places.items()
        }
        gpus = {"gpus": list(self.gpus.items())} if self.gpus else {}
        text = json.dumps({"places": places, "notes": self.notes, "size": self.size, **gpus}).encode()
        if len(text) > HEAD - WORD:
            raise RunError(f"{len(self.places)} cells are too many to lay out in shared memory")
        segment.memory[WORD : WORD + len(text)] = text
        segment.words[0] = len(text)

    @classmethod
    def read(cls, segment: Segment) -> Layout:
        described = json.loads(segment.memory[WORD : WORD + segment.words[0]])
        layout = cls()
        layout.size, layout.notes = described["size"], described["notes"]
        layout.gpus = dict(described.get("gpus", ()))
        layout.places = {
            name: TensorPlace(offset, getattr(torch, dtype), tuple(shape))
            for name, (offset, dtype, shape) in described["places"].items()
        }
        return layout

    def tensor(self, segment: Segment, name: str) -> Tensor:
        place = self.places[name]
        return segment.tensor(place.offset, place.dtype, place.shape)

    def under(self, segment: Segment, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names start with a prefix, by the rest of their names."""
        names = [name for name in self.places if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.tensor(segment, name) for name in names}
