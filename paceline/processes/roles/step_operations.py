"""Performs what a step awaits, other than gradients: calls, means, sleeps, and operations that were started."""

from __future__ import annotations

from typing import Any

from paceline.ops import Call, Mean, Op, Pending, Sleep, Start, copied
from paceline.processes.calls.client import CallClient
from paceline.processes.calls.mailbox import Mailbox
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.roles.waiting import Waiting
from paceline.processes.transport import Means
from paceline.worker import Worker


class StepOperations:
    """The operations of one worker."""

    def __init__(
        self, memory: RunMemory, worker: Worker, calls: CallClient | None, means: Means, waiting: Waiting
    ) -> None:
        self._memory, self._worker, self._calls, self._means, self._waiting = memory, worker, calls, means, waiting
        self._started: list[tuple[Pending[Any], Any]] = []
        self.last_mean = -1  # the last step that came to a mean

    def perform(self, op: Op[Any]) -> Any:
        """Perform an operation, and give its result."""
        match op:
            case Call():
                assert self._calls is not None
                return self._calls.call(op)
            case Mean():
                return self._means.mean(op, first=self._first_mean())
            case Sleep(seconds):
                return self._waiting.pause(seconds)
            case Start(inner):
                return self._start(copied(inner))
            case Pending():
                return op.result if op.done else self._finish(op)

    def forget(self) -> None:
        """The step was abandoned: nothing waits for its operations any more."""
        self._means.forget()
        if self._calls is not None:
            self._calls.forget()
        self._started.clear()

    def _first_mean(self) -> bool:
        """Whether this is the step's first mean: only there can a restarted worker begin the same step beside it."""
        first, self.last_mean = self.last_mean != self._worker.t, self._worker.t
        return first

    def _start(self, op: Op[Any]) -> Pending[Any]:
        pending: Pending[Any] = Pending(op)
        match op:
            case Call() if self._calls is not None and op.method.atomic:
                self._started.append((pending, self._calls.post(op, ahead=True)))
            case Mean():
                self._started.append((pending, self._means.arrive(op, first=self._first_mean())))
            case Sleep(seconds):
                self._started.append((pending, self._memory.now() + int(seconds * 1e9)))
            case _:
                pending.done, pending.result = True, self.perform(op)
        return pending

    def _finish(self, pending: Pending[Any]) -> Any:
        ticket = next(ticket for one, ticket in self._started if one is pending)
        self._started = [pair for pair in self._started if pair[0] is not pending]
        if isinstance(ticket, Mailbox):
            assert self._calls is not None
            result = self._calls.collect(ticket)
        elif isinstance(ticket, int):
            self._waiting.pause((ticket - self._memory.now()) / 1e9)
            result = None
        else:
            result = self._means.leave(ticket)
        pending.done, pending.result = True, result
        return result
