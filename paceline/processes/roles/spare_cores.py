"""The cores that a run leaves free: a process that updates a big vector uses its share of them, and workers' batches
are read ahead on them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count as counting

import torch

from paceline.processes.memory import cores
from paceline.processes.memory.run_memory import RunMemory
from paceline.rules import blocks

READERS = 4  # threads that read batches ahead, for one core


def share(memory: RunMemory, *, serves: bool, available: float | None = None) -> int:
    """How many cores this process may use for an update: its own, and its share of those that no process of the run on
    this node computes on. Where there are servers these update the big vectors; elsewhere workers do. Under the
    server's lock one worker at a time does, so that all free cores are its own."""
    plan, board, here = memory.plan, memory.board, memory.node.number
    workers = sum(board.node[rank] == here for rank in range(plan.hosts))
    servers = sum(board.server_node[shard] == here for shard in range(board.servers))
    locked = memory.locked_calls() and not memory.direct()
    at_servers = bool(memory.scheme.methods) and not memory.direct() and not locked
    if serves != at_servers or (not serves and plan.hosts < plan.workers):
        return 1  # several workers of one process are threads of it: they share its core
    free = int(cores.available() if available is None else available) - workers * plan.worker_threads
    if locked:
        return 1 + max(free, 0)
    return 1 + max(free - servers, 0) // max(servers if serves else workers, 1)


def for_batches(memory: RunMemory, available: float | None = None) -> bool:
    """Whether a core is free on which a thread of this worker can read batches ahead. One serves a few workers: a
    thread works for a part of each step."""
    plan, board, here = memory.plan, memory.board, memory.node.number
    if plan.hosts < plan.workers:
        return False  # several workers of one process are threads of it, which take turns
    workers = sum(board.node[rank] == here for rank in range(plan.hosts))
    servers = sum(board.server_node[shard] == here for shard in range(board.servers))
    serving = 0 if memory.locked_calls() or memory.direct() else servers
    free = int(cores.available() if available is None else available) - workers * plan.worker_threads - serving
    return free >= 1 and free * READERS >= workers


class SpareCores:
    """Threads that work on the blocks of a vector. Whichever is free takes the next block: a core that turns out to be
    busy delays an update by one block at most."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._threads: ThreadPoolExecutor | None = None

    def perform(self, work: Callable[[int], None], count: int) -> None:
        numbers = counting()

        def take() -> None:
            with torch.no_grad():
                while (number := next(numbers)) < count:
                    work(number)

        if self._threads is None:
            self._threads = self._started()
        helping = [self._threads.submit(take) for _ in range(min(self._number, count) - 1)]
        try:
            take()
        finally:
            for one in helping:
                if not one.cancel():
                    one.result()

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()

    def _started(self) -> ThreadPoolExecutor:
        """A thread's operations are its own core's. Torch would give a new thread as many as were set last."""
        before = torch.get_num_threads()
        pool = ThreadPoolExecutor(self._number - 1, "spare core", initializer=torch.set_num_threads, initargs=(1,))
        list(pool.map(int, range(4 * self._number)))
        torch.set_num_threads(before)
        return pool


_in_use: SpareCores | None = None


def use(number: int) -> None:
    """Let the updates of this process use so many cores."""
    global _in_use
    if _in_use is not None:
        _in_use.close()
    _in_use = SpareCores(number) if number > 1 else None
    blocks.use(_in_use.perform if _in_use is not None else None)
