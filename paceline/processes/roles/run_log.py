"""A worker's order log: what it did, in its order, so that the run can be replayed."""

from __future__ import annotations

from typing import Any

from paceline.processes.calls.client import CallClient
from paceline.processes.memory import snapshot
from paceline.processes.memory.board import fence
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.roles import recorder
from paceline.processes.roles.waiting import Waiting
from paceline.processes.roles.worker_cells import WorkerCells
from paceline.processes.transport import Means
from paceline.result import digest
from paceline.runs.order_log import CHANGE, END, GRAD, STEP


class RunLog:
    """One worker's log; where the run keeps none, every method does nothing."""

    def __init__(self, memory: RunMemory, rank: int, cells: WorkerCells, waiting: Waiting) -> None:
        self._memory, self._rank, self._cells, self._waiting = memory, rank, cells, waiting
        self._journal, self._life = recorder.journal_of(memory, f"worker-{rank}", rank=rank)
        self._began = False  # the log says from which cells this life began

    def start(self, calls: CallClient | None, means: Means) -> bool:
        """Record where this life begins, and with which cells if they are not those of the run's start; from now on
        calls and means record too. False if the run has returned to a checkpoint meanwhile: then the servers' position
        is of another generation than this worker."""
        position = int(self._memory.board.performed[0])
        fence()
        if self._waiting.rolled_back():
            return False
        if not self._began:
            self.cells(position, first=self._life == 1 and not self._waiting.generation)
        means.journal = self._journal
        if calls is not None:
            calls.journal = self._journal
        return True

    def cells(self, position: int = 0, *, first: bool = False) -> None:
        """Record the worker's step and cells: a replay cannot know what the process before had done."""
        if self._journal is None:
            return
        board, rank, self._began = self._memory.board, self._rank, True
        self._cells.mirror()
        name = None if first else recorder.save_cells(self._memory, rank, self._life, self._cells.worker._rng)
        self._note(
            t=board.t[rank],
            v=int(self._cells.shared.v),
            gradients=board.gradients[rank],
            overrides=self._memory.load_overrides(),
            generation=self._waiting.generation,
            position=position,
            cells=name,
        )

    def gradient(self, loss: float) -> None:
        if self._journal is not None:
            self._journal.add(GRAD, loss)
            self._journal.flush()  # a window may end with this process, and its gradients count all the same

    def step(self, *, flush: bool) -> None:
        if self._journal is not None:
            self._journal.add(STEP)
            if flush:
                self._journal.flush()

    def change(self, hyper: dict[str, Any]) -> None:
        """Record hyper-parameters that a hook has changed."""
        if self._journal is not None:
            self._journal.text(CHANGE, hyper)
            self._journal.flush()

    def checkpoint(self) -> None:
        """Record the checkpoint that the chief has written."""
        if self._journal is not None:
            model = snapshot.model_of(self._memory, prefix=snapshot.KEEP)
            step = self._memory.board.get("checkpoint")
            self._note(checkpoint=step, digest=digest(model), generation=self._waiting.generation)

    def returned(self, generation: int) -> None:
        """Record that the worker has returned to a checkpoint."""
        if self._journal is not None:
            self._note(**{"return": generation})

    def end(self) -> None:
        if self._journal is not None:
            self._journal.add(END)
            self._journal.flush()

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _note(self, **facts: Any) -> None:
        assert self._journal is not None
        self._journal.note(facts)
        self._journal.flush()
