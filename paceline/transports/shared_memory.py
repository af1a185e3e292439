"""One machine: all servers work on the workers' mailboxes in shared memory, and nothing travels."""

from __future__ import annotations

from collections.abc import Callable

from paceline.processes.calls.mailbox import Lane
from paceline.processes.memory.run_memory import Stage


class SharedMemory:
    """No server is on another node."""

    name = "shared-memory"

    def calls(self, memory: Stage, rank: int, lanes: list[Lane], ended: Callable[[], bool]) -> None:
        return None

    def port(self, memory: Stage, shard: int, lanes: list[Lane]) -> None:
        return None

    def order(self, memory: Stage, shard: int) -> None:
        return None
