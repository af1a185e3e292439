"""Means in the shared memory of one machine."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.config.endpoint import Endpoint
from paceline.processes.calls.zero_copy import SMALLEST, BufferPool, over
from paceline.processes.means.shared_means import SharedMeans, new_vector
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.transport import WaitFor
from paceline.state import Vector


class SharedCollective:
    """All workers read each other's vectors where they are."""

    name = "shared"
    device = "cpu"

    def means(self, memory: RunMemory, rank: int, wait_for: WaitFor) -> SharedMeans:
        pool = BufferPool()

        def empty(length: int, dtype: torch.dtype) -> Vector:
            """In memory that is used again: the system would clear a new block, which takes longer than the mean."""
            size = length * dtype.itemsize
            return new_vector(length, dtype) if size < SMALLEST else over(pool.block(size), dtype, (length,))

        return SharedMeans(memory, rank, wait_for, empty)

    def store(self, endpoint: Endpoint, warn: Callable[[str], None]) -> None:
        return None
