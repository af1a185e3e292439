"""The memory that a launcher makes for a run: the board, the wakeup pipes, and the segment for the state."""

from __future__ import annotations

import os
import time
from typing import Any

from paceline.config.endpoint import ALONE, Endpoint
from paceline.config.plan import Plan
from paceline.processes.memory import gpu_memory
from paceline.processes.memory.board import Board
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.memory.segment import anonymous
from paceline.processes.memory.wakeup import Wakeup
from paceline.processes.roles.main import RoleContext
from paceline.processes.roles.roles import servers_of
from paceline.scheme import Scheme


class LaunchMemory:
    """The launcher's view of the run. The chief lays out the state: until then `opened` is false."""

    def __init__(self, plan: Plan, scheme: Scheme, objects: dict[str, Any], node: Endpoint) -> None:
        self.plan, self.scheme = plan, scheme
        self.board = board = Board.create(plan.workers, servers_of(plan, scheme))
        board.put("began", time.monotonic_ns())
        board.put("goal", -1)
        board.put("checkpoint", -1)
        board.put("joined", 1)
        for rank in range(plan.workers):
            board.alive[rank] = board.known[rank] = 1
        self.pipes = Wakeup.create(board.roles)
        self.wakeup = Wakeup(board, self.pipes, board.launcher)
        self.state = anonymous("paceline-state")
        # a script chooses its device itself, later
        self.letters = gpu_memory.letterbox() if node == ALONE else None
        self.context = RoleContext(plan, board, self.pipes, self.state, objects, node, self.letters)
        self._memory: RunMemory | None = None

    def opened(self) -> bool:
        """Whether the state can be read."""
        if self._memory is None and self.board.get("ready"):
            node = self.context.node
            memory = RunMemory(self.plan, self.scheme, self.board, self.wakeup, self.state, node, self.letters)
            memory.open()
            self._memory = memory
            self.plan, self.scheme = memory.plan, memory.first_scheme  # a script has chosen them by now
        return self._memory is not None

    @property
    def memory(self) -> RunMemory:
        assert self._memory is not None
        return self._memory

    def updates(self) -> int:
        """Updates of the centre so far."""
        return self.memory.furthest if self.opened() else 0

    def raise_alarm(self) -> None:
        """A process has died or was stopped: the processes that wait for it restart their patience."""
        self.board.put("alarm", self.board.get("alarm") + 1)

    @property
    def descriptors(self) -> list[int]:
        """All that a process of another node of this host needs to work on this memory."""
        return [self.board.descriptor, self.state, *self.pipes]

    def close(self) -> None:
        for descriptor in (*self.descriptors, *(self.letters or ())):
            os.close(descriptor)
