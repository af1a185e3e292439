"""A stage with shared memory for tests, and plays on it by forked processes, without any launcher."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.config.plan import Plan
from paceline.processes.calls.client import CallClient
from paceline.processes.calls.locked_client import LockedClient
from paceline.processes.memory.board import Board
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.memory.segment import anonymous
from paceline.processes.memory.wakeup import Wakeup
from paceline.processes.roles.caretaker import Caretaker
from paceline.processes.roles.server import Server
from paceline.scheme import Scheme
from paceline.state import Vector
from paceline.testing._transport_nodes import PATIENCE, exit_code, fork


class Theatre:
    """Board, wakeups and state of a run; every process opens its own view of them."""

    def __init__(
        self,
        scheme: Scheme,
        x0: Vector,
        *,
        workers: int = 2,
        servers: int = 1,
        directory: Path | None = None,
        locked: bool = False,
        **plan: Any,
    ) -> None:
        """`locked`: workers perform the calls of the only server themselves, as on one machine."""
        self.locked = locked
        shards = servers if scheme.methods else 0
        self.plan = Plan(workers=workers, servers=shards, directory=str(directory or ""), **plan)
        self.scheme = scheme
        self.board = Board.create(workers, shards)
        for rank in range(workers):
            self.board.alive[rank] = self.board.known[rank] = 1
        self.board.put("goal", -1)
        self.board.put("checkpoint", -1)
        self._wakeup = Wakeup.create(self.board.roles)
        self._state = anonymous("paceline-test")
        chief = RunMemory(self.plan, scheme, self.board, Wakeup(self.board, self._wakeup, 0), self._state)
        chief.lay_out(x0, {}, {})
        self.board.put("ready", 1)

    def memory(self, place: int) -> RunMemory:
        """A process's own view; `place` is the number of its bell."""
        memory = RunMemory(self.plan, self.scheme, self.board, Wakeup(self.board, self._wakeup, place), self._state)
        memory.open()
        return memory

    def link(self, rank: int) -> CallClient:
        memory = self.memory(rank)
        return (LockedClient if self.locked else CallClient)(memory, rank, waiting(memory))

    def serve(self, shard: int) -> Callable[[], None]:
        """A server's whole life, for a process of its own; it ends when all workers have gone."""

        def play() -> None:
            memory = self.memory(self.board.server_place(shard))
            (Caretaker(memory) if self.locked else Server(memory, shard)).run()

        return play

    def servers(self) -> list[Callable[[], None]]:
        return [self.serve(shard) for shard in range(self.plan.servers)]

    def gone(self, rank: int) -> None:
        """A worker has said goodbye."""
        self.board.alive[rank] = 0
        self.board.gone[rank] = self.board.parted[rank] = 1
        self.memory(rank).wakeup.ring_all()

    def all_gone(self) -> None:
        for rank in range(self.plan.workers):
            self.gone(rank)

    def died(self, rank: int) -> None:
        """What a launcher does when it hears of a death."""
        self.board.alive[rank] = self.board.at_key[rank] = 0
        self.memory(rank).wakeup.ring_all()

    def close(self) -> None:
        for descriptor in (*self._wakeup, self._state, self.board.descriptor):
            os.close(descriptor)


def waiting(memory: RunMemory) -> Callable[[Callable[[], bool], str], None]:
    def wait_for(ready: Callable[[], bool], what: str) -> None:
        assert memory.wakeup.wait(ready, PATIENCE), f"waited too long for {what}"

    return wait_for


class Company:
    """Forked processes: each plays its part, and what went wrong in it is told."""

    def __init__(self, *parts: Callable[[], object]) -> None:
        self.pids = [fork(part) for part in parts]

    def kill(self) -> None:
        """Those that are still there."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def end(self, *indices: int) -> list[int]:
        """Wait for some of them, or all; gives their exit codes."""
        chosen = [self.pids[index] for index in indices] if indices else self.pids
        return [exit_code(pid) for pid in chosen]


def played(*parts: Callable[[], object]) -> None:
    """All parts at once, to their ends, without any fault."""
    codes = Company(*parts).end()
    assert codes == [0] * len(parts), codes


def as_list(vectors: Sequence[Vector]) -> list[list[float]]:
    return [vector.tolist() for vector in vectors]
