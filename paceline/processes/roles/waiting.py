"""How a worker waits for other processes: until a condition holds, the run stops, or it returns to a checkpoint; and
how it performs what a step awaits, other than gradients: calls, means, sleeps, and operations that were started."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from paceline.errors import Deadlock
from paceline.ops import Call, Mean, Meet, Op, Pending, Receive, Send, Sleep, Start, copied
from paceline.processes.calls.client import CallClient, RolledBack, Stopped
from paceline.processes.calls.mailbox import Mailbox
from paceline.processes.memory.board import GENERATION, GOAL, HALT, STARTING, STOP, TRAINING, WAITING
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.roles.shared_messages import SharedMessages
from paceline.processes.transport import PARTS_OF_A_MEAN, CarriesMessages, Means
from paceline.runs.times_log import PART, Spent, Stamp, code
from paceline.runtime.call_scheduler import explain
from paceline.runtime.step_driver import StepDriver
from paceline.worker import Worker

WAIT_FOR_PARTS = code(Spent.WAIT, PART)


class Waiting:
    """The waits of one worker. Each ends with `Stopped` or `RolledBack` if the run stops or returns to a checkpoint."""

    def __init__(self, memory: RunMemory, rank: int, driver: StepDriver) -> None:
        self._memory, self._board, self._rank, self._driver = memory, memory.board, rank, driver
        self.generation = memory.board.get("generation")  # the run's, when this worker last returned to a checkpoint
        self.op: Op[Any] | None = None  # what the step awaits
        self.meanwhile: Callable[[], None] | None = None  # work of the training loop, done before this worker sleeps
        self.stamp: Stamp | None = None  # notes how long each wait takes
        self._flush: Callable[[], None] | None = None
        self._means: Means | None = None

    def serve(self, calls: CallClient | None, means: Means) -> None:
        """Send calls before each wait, and answer what other workers need for means during it."""
        self._flush, self._means = calls.flush if calls is not None else None, means

    def rolled_back(self) -> bool:
        """Whether the run has returned to a checkpoint since this worker last did."""
        return bool(self._board.run[GENERATION] != self.generation)

    def interrupted(self) -> bool:
        """Whether the run has stopped, or returned to a checkpoint."""
        run = self._board.run
        return bool(run[STOP] or run[GENERATION] != self.generation)

    def wait_for(self, ready: Callable[[], bool], what: str) -> None:
        """Wait for other processes. Deadlock if nothing in the run has moved for `patience` seconds."""
        if ready():
            if self.rolled_back():  # a server that returns to a checkpoint marks every call as answered
                raise RolledBack
            return
        if self._flush is not None:
            self._flush()
        if self.meanwhile is not None:
            self.meanwhile()
        began = monotonic_ns()
        try:
            self._sleep_until(ready, what)
        finally:
            if self.stamp is not None:
                self.stamp(WAIT_FOR_PARTS if what is PARTS_OF_A_MEAN else Spent.WAIT, began)

    def _sleep_until(self, ready: Callable[[], bool], what: str) -> None:
        memory, run, state, means = self._memory, self._board.run, self._board.state, self._means
        generation, patience = self.generation, memory.plan.patience
        assert means is not None

        def woken() -> bool:
            return ready() or bool(run[STOP]) or run[GENERATION] != generation or means.rung()

        while True:
            state[self._rank] = WAITING
            if not memory.wakeup.wait(woken, patience / 4):
                self._outwait(woken, what, patience)
            state[self._rank] = TRAINING
            if run[GENERATION] != generation:
                raise RolledBack
            if ready():
                return
            if run[STOP]:
                raise Stopped
            means.answer()

    def pause(self, seconds: float) -> None:
        """Sleep."""
        if self._flush is not None:
            self._flush()
        until = self._memory.now() + int(seconds * 1e9)
        while (left := (until - self._memory.now()) / 1e9) > 0:
            self._memory.wakeup.wait(self.interrupted, left)
            self._check()

    def wait_for_updates(self, count: int) -> None:
        """Wait until the servers have made `count` updates."""
        if self._flush is not None:
            self._flush()
        memory = self._memory
        while memory.updates < count:  # no server wakes this worker for that: look every millisecond
            memory.wakeup.wait(lambda: memory.updates >= count or self.interrupted(), 0.001)
            self._check()

    def wait_for_goal(self, goal: int) -> None:
        """Wait at the last update until every worker has made it: a stop would abandon a step that another worker is
        still in. If nothing moves for `patience`, the others need this worker, and the centre's count decides. While
        the run is asked to halt, the goal may change: the worker that names it is asked to do so, the others wait."""
        memory, means, patience, run = self._memory, self._means, self._memory.plan.patience, self._board.run
        assert means is not None
        moved, since = self._motion(), memory.now()
        if memory.scheme.decentralised:  # a worker may wait for this one at a step that it has finished
            memory.wakeup.ring_all()

        def reached() -> bool:
            if self.interrupted() or run[GOAL] != goal:
                return True
            if run[HALT]:
                return self._rank == memory.centre_of()
            return not any(v < goal and memory.comes_to(rank) for rank, v in enumerate(memory.versions()))

        while not reached():
            means.wait(reached, patience / 4)
            if self._motion() != moved:
                moved, since = self._motion(), memory.now()
            elif memory.now() - since >= patience * 1e9 and memory.updates >= goal:
                return

    def _check(self) -> None:
        if self.interrupted():
            raise Stopped if self._board.run[STOP] else RolledBack

    def _outwait(self, woken: Callable[[], bool], what: str, patience: float) -> None:
        """Wait as long as anything in the run moves, and for `patience` seconds more: twice as long while a worker of
        another node prepares its first step, because the coordinator finds out within `patience` whether it hangs."""
        memory, board = self._memory, self._board
        moved, since = self._motion(), memory.now() - int(patience / 4 * 1e9)
        while not memory.wakeup.wait(woken, patience / 4):
            if self._motion() != moved:
                moved, since = self._motion(), memory.now()
                continue
            elsewhere = (rank for rank in range(board.workers) if board.alive[rank] and not memory.beside(rank))
            preparing = any(board.state[rank] == STARTING for rank in elsewhere)
            if memory.now() - since >= patience * (1 + preparing) * 1e9:
                where = self._driver.line()
                raise Deadlock(f"worker:{self._rank} waited {patience:g} s at {where} for {self._why(what)}")

    def _motion(self) -> tuple[int, ...]:
        """Numbers that change as long as anything in the run moves."""
        board = self._board
        others = (rank for rank in range(board.workers) if rank != self._rank)
        held = self._memory.plan.exact or self._memory.plan.quorum == "hold"  # a worker that restarts is waited for
        computing = any((board.alive[rank] or held) and self._at_work(rank) for rank in others)
        # while another worker computes, the run moves, however long a gradient takes
        clock = self._memory.now() if computing else 0
        return (clock, sum(board.gradients), sum(board.t), sum(board.performed), board.get("alarm"))

    def _at_work(self, rank: int) -> bool:
        """Whether a worker computes or prepares its first step. A worker that hangs there is found by the launcher,
        which sees its CPU time. On other nodes only computing can be seen."""
        board, state = self._board, self._board.state[rank]
        preparing = state == STARTING and self._memory.beside(rank) and not board.sleeping[rank]
        return bool(state == TRAINING or preparing)

    def _why(self, what: str) -> str:
        op = self.op.op if isinstance(self.op, Start | Pending) else self.op
        if isinstance(op, Call):
            return explain(self._memory.scheme, self._memory.server_state(), op)
        if isinstance(op, Mean | Meet):
            at_key = self._board.at_key
            missing = [str(rank) for rank, key in enumerate(at_key) if key != at_key[self._rank]]
            if op.among is not None:
                missing = [rank for rank in missing if int(rank) in op.among]
            what = "a mean" if isinstance(op, Mean) else f"a meeting at step {op.t}"
            return f"{what}; worker {', '.join(missing) or 'nobody'} has not arrived"
        return what


class StepOperations:
    """The operations of one worker."""

    def __init__(
        self, memory: RunMemory, worker: Worker, calls: CallClient | None, means: Means, waiting: Waiting
    ) -> None:
        self.messages: SharedMessages | None = None
        if memory.scheme.sends_messages():
            remote = means.messages() if isinstance(means, CarriesMessages) else None
            self.messages = SharedMessages(memory, worker.rank, waiting, remote)
        self._memory, self._worker, self._calls, self._means, self._waiting = memory, worker, calls, means, waiting
        self._started: list[tuple[Pending[Any], Any]] = []
        self.last_mean = -1  # the last step that came to a mean

    def perform(self, op: Op[Any]) -> Any:
        """Perform an operation, and give its result."""
        match op:
            case Call():
                assert self._calls is not None
                return self._calls.call(op)
            case Mean() | Meet():
                return self._means.mean(op, first=self._first_mean())
            case Send() if self.messages is not None:
                return self.messages.send(op)
            case Receive() if self.messages is not None:
                return self.messages.receive()
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
            case Mean() | Meet():
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
