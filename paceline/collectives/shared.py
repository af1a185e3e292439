"""Means in the shared memory of one machine."""

from __future__ import annotations

from collections.abc import Callable

from paceline.config.endpoint import Endpoint
from paceline.processes.means import SharedMeans
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.transport import WaitFor


class SharedCollective:
    """All workers read each other's vectors where they are."""

    name = "shared"
    device = "cpu"

    def means(self, memory: RunMemory, rank: int, wait_for: WaitFor) -> SharedMeans:
        return SharedMeans(memory, rank, wait_for)

    def store(self, endpoint: Endpoint, warn: Callable[[str], None]) -> None:
        return None
