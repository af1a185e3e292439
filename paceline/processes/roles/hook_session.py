"""A worker's run as its hooks see it, in real processes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic_ns
from typing import Any

from torch import Tensor

from paceline.config import build
from paceline.errors import UsageError
from paceline.processes.calls.client import CallClient, Stopped
from paceline.processes.calls.mailbox import SET
from paceline.processes.memory import snapshot
from paceline.processes.memory.board import BEGAN, EVALUATING, RUNNING, STOP, STOPPING
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.roles.checkpointing import Checkpointing
from paceline.processes.roles.control_channel import Control
from paceline.processes.roles.current_work import busy
from paceline.processes.roles.evaluator import Evaluation
from paceline.processes.roles.membership import Membership
from paceline.processes.roles.recorder import RunLog
from paceline.processes.roles.waiting import Waiting
from paceline.processes.roles.worker_cells import WorkerCells
from paceline.result import Staleness
from paceline.runs.times_log import Spent
from paceline.runtime.gradient_norm import GradientNorm
from paceline.runtime.step_driver import StepDriver
from paceline.state import Vector
from paceline.worker import Worker


@dataclass(frozen=True, eq=False)
class HookSession:
    """`paceline.hook.Session` says what each member means."""

    _memory: RunMemory
    _cells: WorkerCells
    _buffer_policy: str
    _calls: CallClient | None
    _driver: StepDriver
    _waiting: Waiting
    _membership: Membership
    _checkpoints: Checkpointing
    _log: RunLog
    _evaluation: Evaluation
    _control: Control
    _norm: GradientNorm
    _run: memoryview = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_run", self._memory.board.run)  # hooks that rest ask for the time at every step

    @property
    def worker(self) -> Worker:
        return self._cells.worker

    @property
    def updates(self) -> int:
        return self._cells.updates

    @property
    def seconds(self) -> float:
        return (monotonic_ns() - self._run[BEGAN]) / 1e9

    @property
    def samples(self) -> int:
        return sum(self._memory.board.samples)

    @property
    def bytes_sent(self) -> int:
        return sum(self._memory.board.sent)

    @property
    def bytes_received(self) -> int:
        return sum(self._memory.board.received)

    @property
    def staleness(self) -> Staleness:
        if self._calls is not None:
            self._calls.show(counts=True)
        return self._memory.staleness()

    @property
    def directory(self) -> Path | None:
        return Path(self._memory.plan.directory)

    def gradient_norm(self) -> float:
        return self._norm.read()

    def model(self) -> Vector:
        if self._calls is not None:
            self._calls.show()
        return snapshot.steady(self._memory)

    def trained_model(self) -> Any:
        return self._evaluation.model(self.model(), snapshot.buffers_of(self._memory, self._buffer_policy))

    def evaluate(self, x: Vector | None = None) -> dict[str, float]:
        buffers = snapshot.buffers_of(self._memory, self._buffer_policy)
        began = monotonic_ns()
        with busy(self._memory.board, self.worker.rank, EVALUATING):
            metrics = self._evaluation.of(self.model() if x is None else x, buffers)
        self._log.spent(Spent.EVALUATION, began)
        return metrics

    def say(self, text: str) -> None:
        print(text, file=getattr(sys.stdout, "log", sys.stdout), flush=True)  # into the role's log only
        self._control.send({"say": text})

    def record(self, values: dict[str, float]) -> None:
        self._control.send({"record": {"update": self.updates, "seconds": self.seconds, **values}})

    def stop(self, reason: str) -> None:
        if self._memory.board.run[STOP] == RUNNING:
            self._control.send({"stopped": reason})
            in_step = self._calls is None or self._memory.plan.exact
            if in_step and math.isfinite(self._memory.board.loss[self.worker.rank]):
                self._memory.board.put("halt", 1)  # the run ends at a step of all workers
            else:
                self._memory.stop(STOPPING)

    def leave(self, reason: str) -> None:
        self._membership.leaving = True

    def save(self) -> None:
        self._checkpoints.ask()

    def keep(self, name: str, tensor: Tensor) -> None:
        self._checkpoints.hook_tensors[name] = tensor.detach().cpu()

    def kept(self, name: str) -> Tensor | None:
        step = self._memory.board.get("checkpoint")
        return snapshot.find(self._memory, step).tensors.get(f"hook.{name}") if step >= 0 else None

    def set(self, **hyper: Any) -> None:
        memory, chief = self._memory, self.worker.rank == 0
        memory.scheme = build.scheme_of(memory.scheme, hyper)
        memory.scheme.check(memory.plan.workers)
        self._driver.scheme = memory.scheme
        self._log.change(hyper)
        if chief and self._calls is not None:
            if memory.plan.exact:  # the change comes between two updates, always the same two
                self._waiting.wait_for_updates(self.worker.t)
            flat = [part for pair in hyper.items() for part in pair]
            self._calls.special(SET, *flat)
        elif chief:
            memory.save_overrides(memory.overrides | hyper)

    def value(self, key: str) -> Any:
        return build.value_of(self._memory.scheme, key)

    def wait(self, condition: Callable[[], bool], what: str, *, away: bool = False) -> None:
        if condition():
            return
        if away and self._memory.plan.exact:
            raise UsageError(f"an exact run cannot train without a worker, and this one would wait for {what}")
        if away:
            self._membership.step_aside()
        while not condition():  # no process wakes this one for a hook's condition: look now and then
            self._memory.wakeup.wait(lambda: bool(condition() or self._waiting.interrupted()), 0.02)
            if self._memory.board.run[STOP] and not condition():
                raise Stopped
            if self._waiting.rolled_back():
                self._membership.return_to_checkpoint()
        if away:
            self._membership.join()

    def begun(self) -> int:
        return sum(self._memory.board.begun)
