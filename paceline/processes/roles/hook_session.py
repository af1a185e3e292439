"""A worker's run as its hooks see it, in real processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.config import build
from paceline.errors import UsageError
from paceline.processes.calls.client import CallClient, RolledBack, Stopped
from paceline.processes.calls.mailbox import SET
from paceline.processes.memory import snapshot
from paceline.processes.memory.board import GENERATION, RUNNING, STOP, STOPPING, Board
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.roles.control_channel import Control
from paceline.result import Staleness
from paceline.runs.order_log import CHANGE, OrderLogWriter
from paceline.runtime.step_driver import StepDriver
from paceline.state import Vector
from paceline.task import Task
from paceline.worker import Worker

SNAPSHOTS = 1 << 20  # numbers of snapshots before a return to a checkpoint, and after it


class View:
    """What a session shows and lets hooks do; `paceline.hook.Session` says what each member means."""

    memory: RunMemory
    board: Board
    task: Task
    control: Control
    worker: Worker
    device: torch.device
    rank: int
    chief: bool
    _driver: StepDriver
    _link: CallClient | None
    _generation: int
    _leaving: str | None
    _writing: int
    _asked_at = 0  # when the snapshot that is being written was asked for, ns
    _kept: dict[str, Tensor]
    turn: AbstractContextManager[Any]  # held while the task computes: workers of one process share it
    journal: OrderLogWriter | None

    @property
    def updates(self) -> int:
        # without a server all who take part have the centre: by another's count, schedules would differ among workers
        if self._link is None and self.board.alive[self.rank]:
            return int(self.worker.state.v)
        if self.memory.plan.exact:  # each step is one update; whether the server has made it yet is chance
            return self.worker.t
        return self.memory.updates

    @property
    def seconds(self) -> float:
        return self.memory.seconds()

    @property
    def samples(self) -> int:
        return sum(self.board.samples)

    @property
    def staleness(self) -> Staleness:
        self._show()
        return self.memory.staleness()

    @property
    def directory(self) -> Path | None:
        return Path(self.memory.plan.directory)

    def model(self) -> Vector:
        self._show()
        return snapshot.steady(self.memory)

    def _show(self) -> None:
        """Have what lies at servers of other nodes here."""
        if self._link is not None:
            self._link.show()

    def evaluate(self, x: Vector | None = None) -> dict[str, float]:
        buffers = snapshot.buffers_of(self.memory, self.task.buffer_policy)
        vector = self.model() if x is None else x
        there = {name: buffer.to(self.device) for name, buffer in buffers.items()}
        with self.turn:
            return self.task.evaluate(vector.to(self.device), there or None)

    def say(self, text: str) -> None:
        print(text, flush=True)  # into the role's log
        self.control.send({"say": text})

    def record(self, values: dict[str, float]) -> None:
        self.control.send({"record": {"update": self.updates, "seconds": self.seconds, **values}})

    def stop(self, reason: str) -> None:
        if self.board.run[STOP] == RUNNING:
            self.control.send({"stopped": reason})
            if (self._link is None or self.memory.plan.exact) and math.isfinite(self.board.loss[self.rank]):
                self.board.put("halt", 1)  # a step will be found at which all can end
            else:
                self._set_stop(STOPPING)

    def leave(self, reason: str) -> None:
        self._leaving = reason

    def save(self) -> None:
        if not self.chief or self._writing:
            return
        board = self.board
        self._asked_at = self.memory.now()
        # a snapshot that a return to a checkpoint has overtaken must not be taken for one of the new course
        self._writing = max(board.get("snapshot"), self._generation * SNAPSHOTS) + 1
        if self._link is not None:
            # with `exact`, all at this step: nobody can be two ahead without this worker
            board.put("snapshot_version", self.worker.t + 2)
        else:
            # every worker passes this version between two steps, and none can be past it yet
            board.put("snapshot_version", self.worker.state.v + 2)
        board.put("snapshot", self._writing)
        if self._link is None or self.memory.plan.exact:
            self._announce()

    def _announce(self) -> None:
        """Go on when every node has heard: nobody may pass a step that was named for all without knowing of it."""
        memory, board = self.memory, self.board
        if memory.node.secret is None:
            return
        number = board.get("notice") + 1
        board.put("notice", number)
        memory.wakeup.ring_all()

        def heard() -> bool:
            ranks, shards = range(board.workers), range(board.servers)
            workers = all(memory.beside(r) or board.noticed[r] >= number or not board.alive[r] for r in ranks)
            return workers and all(memory.near(shard) or board.server_noticed[shard] >= number for shard in shards)

        memory.wakeup.wait(lambda: heard() or self._interrupted())

    def keep(self, name: str, tensor: Tensor) -> None:
        self._kept[name] = tensor.detach().cpu()

    def kept(self, name: str) -> Tensor | None:
        step = self.board.get("checkpoint")
        return snapshot.find(self.memory, step).tensors.get(f"hook.{name}") if step >= 0 else None

    def set(self, **hyper: Any) -> None:
        self.memory.scheme = build.scheme_of(self.memory.scheme, hyper)
        self.memory.scheme.check(self.memory.plan.workers)
        self._driver.scheme = self.memory.scheme
        if self.journal is not None:
            self.journal.text(CHANGE, hyper)
            self.journal.flush()
        if self.chief and self._link is not None:
            if self.memory.plan.exact:
                self._await_updates()  # it comes between two of them, and always the same two
            flat = [part for pair in hyper.items() for part in pair]
            self._link.special(SET, *flat)
        elif self.chief:
            self.memory.save_overrides(self.memory.load_overrides() | hyper)

    def wait(self, condition: Callable[[], bool], what: str, *, away: bool = False) -> None:
        if condition():
            return
        if away and self.memory.plan.exact:
            raise UsageError(f"an exact run cannot go on without a worker, and this one would wait for {what}")
        if away:
            self._step_aside()
        while not condition():  # others do not ring for what a hook waits for: look now and then
            self.memory.wakeup.wait(lambda: bool(condition() or self._interrupted()), 0.02)
            if self.board.run[STOP] and not condition():
                raise Stopped
            if self._interrupted():
                self._return()
        if away:
            self._join()

    def begun(self) -> int:
        return sum(self.board.begun)

    def _interrupted(self) -> bool:
        run = self.board.run
        return bool(run[STOP] or run[GENERATION] != self._generation)

    def _await_updates(self) -> None:
        """Wait until the servers have made every update that this worker has taken part in."""
        assert self._link is not None
        self._link.flush()
        while self.memory.updates < self.worker.t:  # nobody rings for that: look now and then
            self.memory.wakeup.wait(lambda: self.memory.updates >= self.worker.t or self._interrupted(), 0.001)
            if self._interrupted():
                raise Stopped if self.board.run[STOP] else RolledBack

    def _set_stop(self, why: int) -> None:
        board = self.board
        board.put("stopped", self.memory.now())
        board.put("stop", why)
        self.memory.wakeup.ring_all()

    def _step_aside(self) -> None:
        """Not be counted for a while."""

    def _join(self) -> None:
        """Be counted again."""

    def _return(self) -> None:
        """Go back to a checkpoint with the run."""
