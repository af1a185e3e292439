"""One machine: all servers work on the workers' mailboxes in shared memory, and nothing travels."""

from __future__ import annotations

from collections.abc import Callable

from paceline.processes.calls.mailbox import Mailbox
from paceline.processes.memory.run_memory import RunMemory


class SharedMemoryTransport:
    """No server is on another node."""

    name = "shared-memory"

    def calls(self, memory: RunMemory, rank: int, mailboxes: list[Mailbox], ended: Callable[[], bool]) -> None:
        return None

    def port(self, memory: RunMemory, shard: int, mailboxes: list[Mailbox]) -> None:
        return None

    def order(self, memory: RunMemory, shard: int) -> None:
        return None
