"""Performs cells in several processes at once. However this process ends, they end with it."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import RunError
from paceline.experiments.cells import FAILED, CellOutcome, RunCell
from paceline.fields import finite
from paceline.processes.supervisor import pickled_objects

PATIENCE = 10.0  # seconds that a process has to end, after which it is killed
ATTEMPTS = 2  # processes that may die at a cell before it counts as failed


@dataclass
class CellWorker:
    """One process of the pool, and the cell that it performs."""

    process: subprocess.Popen[bytes]
    news: int
    cell: RunCell | None = None
    share: float = 0.0
    unread: bytes = b""

    def give(self, cell: RunCell) -> None:
        self.cell, self.share = cell, 0.0
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # its end is seen on the other pipe
            self.process.stdin.write((json.dumps(finite(asdict(cell)), default=str) + "\n").encode())
            self.process.stdin.flush()

    def heard(self) -> Iterator[dict[str, Any]] | None:
        """The messages that have arrived; None at the end of the pipe."""
        data = os.read(self.news, 65536)
        if not data:
            return None
        *lines, self.unread = (self.unread + data).split(b"\n")
        return (json.loads(line) for line in lines)


@dataclass
class CellPool:
    """`performed` runs cells; `watch` is called with the cells that are under way and how far each is."""

    directory: Path
    objects: dict[str, Any]
    jobs: int
    watch: Callable[[list[tuple[RunCell, float]]], None]
    finished: Callable[[RunCell, CellOutcome], None]
    _deaths: dict[str, int] = field(default_factory=dict)

    def perform(self, cells: Iterable[RunCell]) -> None:
        """Perform all cells; an error in one is its outcome."""
        waiting = deque(cells)
        if not waiting:
            return
        with selectors.DefaultSelector() as selector, self._workers() as workers:
            for _ in range(min(self.jobs, len(waiting))):
                self._start(workers, selector).give(waiting.popleft())
            while any(worker.cell is not None for worker in workers):
                for key, _ in selector.select(timeout=0.5):
                    worker: CellWorker = key.data
                    messages = worker.heard()
                    if messages is None:
                        self._died(worker, waiting)
                        selector.unregister(worker.news)
                        workers.remove(worker)
                        self._end([worker])
                        if waiting:
                            self._start(workers, selector).give(waiting.popleft())
                        continue
                    for message in messages:
                        self._understand(worker, message, waiting)
                self.watch([(worker.cell, worker.share) for worker in workers if worker.cell is not None])

    def _understand(self, worker: CellWorker, message: dict[str, Any], waiting: deque[RunCell]) -> None:
        if "share" in message:
            worker.share = message["share"]
        elif "done" in message and worker.cell is not None:
            cell, worker.cell = worker.cell, None
            outcome = CellOutcome.read(cell.file(self.directory))
            if outcome is None:
                raise RunError(f"the outcome of {cell.title} cannot be read: {cell.file(self.directory)}")
            self.finished(cell, outcome)
            if waiting:
                worker.give(waiting.popleft())

    def _died(self, worker: CellWorker, waiting: deque[RunCell]) -> None:
        """A process has ended in the middle of a cell: killed, or out of memory."""
        code = worker.process.wait()
        cell = worker.cell
        if cell is None:
            return
        self._deaths[cell.key] = self._deaths.get(cell.key, 0) + 1
        if self._deaths[cell.key] < ATTEMPTS:
            waiting.appendleft(cell)
            return
        text = f"signal {-code}" if code < 0 else f"exit code {code}"
        self.finished(cell, CellOutcome(FAILED, [], f"its process ended with {text}, {ATTEMPTS} times"))

    def _start(self, workers: list[CellWorker], selector: selectors.BaseSelector) -> CellWorker:
        descriptor = pickled_objects.packed(self.objects)
        ours, theirs = os.pipe()
        command = [sys.executable, "-m", "paceline.experiments", str(theirs), str(descriptor), str(os.getpid())]
        paths = os.pathsep.join(path for path in sys.path if path)
        process = subprocess.Popen(
            [*command, str(self.directory)],
            pass_fds=(theirs, descriptor),
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches only this process, which ends the others
            env=os.environ | {"PYTHONPATH": paths},
        )
        os.close(theirs)
        os.close(descriptor)
        worker = CellWorker(process, ours)
        workers.append(worker)
        selector.register(ours, selectors.EVENT_READ, worker)
        return worker

    @contextmanager
    def _workers(self) -> Iterator[list[CellWorker]]:
        workers: list[CellWorker] = []
        try:
            yield workers
        finally:
            self._end(workers)

    def _end(self, workers: list[CellWorker]) -> None:
        """End processes: those that perform a cell by a signal, which a real run answers by ending in order."""
        for worker in workers:
            if worker.cell is not None:
                with suppress(ProcessLookupError):
                    worker.process.send_signal(signal.SIGTERM)
            assert worker.process.stdin is not None
            with suppress(BrokenPipeError):
                worker.process.stdin.close()
        until = time.monotonic() + PATIENCE
        for worker in workers:
            try:
                worker.process.wait(max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            os.close(worker.news)
