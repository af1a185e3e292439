"""A worker's run in real processes. The session owns the loop: it drives the scheme's step from one wait to the next,
and gives the one thing it does not do itself, computing a gradient, to whoever holds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from paceline import recording
from paceline.board import GENERATION, RUNNING, STARTING, STOP, STOPPING, TRAINING, WAITING
from paceline.collectives.distributed import DistributedMeans
from paceline.collectives.shared import SharedMeans
from paceline.control import Control
from paceline.desk import explain
from paceline.drive import Driver
from paceline.errors import Deadlock, LossError, SchemeError
from paceline.hook import Hook
from paceline.journal import GRAD, STEP
from paceline.ops import Call, Grad, Mean, Op, Pending, Sleep, Start, copied
from paceline.saving import Saving
from paceline.seeds import mixed
from paceline.stage import Stage
from paceline.state import State, Vector
from paceline.task import Batch, Task
from paceline.transports.lane import Lane
from paceline.transports.shared import Link, RolledBack, Stopped
from paceline.worker import Worker


class RealSession(Saving):
    """One worker among processes. `advance` runs until a gradient is wanted; `give` goes on with it."""

    def __init__(
        self,
        stage: Stage,
        task: Task,
        rank: int,
        hooks: Sequence[Hook],
        control: Control,
        turn: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.stage, self.task, self.rank, self.control = stage, task, rank, control
        self.turn = turn or nullcontext()
        self._exact = stage.plan.exact
        self.board = stage.board
        self.chief = rank == 0
        self._generation = self.board.get("generation")
        self._state = stage.worker_state(rank)
        self.device = stage.device(rank)
        self.worker = Worker(rank, stage.plan.workers, self._on_device(), stage.plan.seed)
        self.worker.t = self.board.t[rank]
        if (
            self.board.begun[rank] and not self._exact
        ):  # back from the dead: not the numbers of its first life once more
            self.worker.rng.manual_seed(mixed(stage.plan.seed, "worker", rank, "again", self.worker.t))
        elif self.worker.t or self._exact:
            self.worker.rng.set_state(stage.tensor(f"rng.{rank}"))
        self.buffers = stage.buffers(rank)
        self.live = {name: buffer.to(self.device) for name, buffer in self.buffers.items()}  # on a cpu the same ones
        self._driver = Driver(stage.scheme, self.worker)
        shared = stage.plan.collective == "shared"
        self._means = (SharedMeans if shared else DistributedMeans)(stage, rank, self._wait_for)
        self._means.generation = self._generation
        self._link = Link(stage, rank, self._wait_for) if stage.scheme.methods else None
        if self._link is not None:
            self._link.device, self._link.generation = self.device, self._generation
        if self.chief:
            self.board.put("saving", 0)  # a predecessor may have died over it
        self._hooks = list(hooks)
        self._begun: list[Hook] = []
        self._feeding = [hook for hook in hooks if type(hook).feed is not Hook.feed]
        self._watching = [hook for hook in hooks if type(hook).after_gradient is not Hook.after_gradient]
        self._before = [hook for hook in hooks if type(hook).before_step is not Hook.before_step]
        self._after = [hook for hook in hooks if type(hook).after_step is not Hook.after_step]
        self.meanwhile: Callable[[], None] | None = None  # what the loop can do for itself before this worker sleeps
        self._guarded = any(hook.guards_loss for hook in hooks)
        self.returns = 0  # to a checkpoint: the loop must take its batches anew
        self._kept: dict[str, Tensor] = {}
        self._started: list[tuple[Pending[Any], Any]] = []
        self._wanted: Pending[Any] | None = None  # who gets the gradient that is being computed
        self._op: Op[Any] | None = None
        self._leaving: str | None = None
        self._met = -1  # the last step that came to a mean
        self._writing = 0  # the snapshot that the chief has asked for and not yet written
        self._count()
        self.journal, self.life = recording.journal_of(stage, f"worker-{rank}", rank=rank)

    def begin(self) -> Grad | None:
        """Take part: hooks begin, and the first gradient is asked for."""
        try:
            self._enter()
            self.board.begun[self.rank] = 1
            self.stage.bells.ring_all()
            for hook in self._hooks:
                self._begun.append(hook)
                self._begin(hook)
        except Stopped:
            return None
        return self.advance(None)

    def _begin(self, hook: Hook) -> None:
        while True:
            try:
                return hook.begin(self)
            except RolledBack:  # it has asked the server for something; once more on the course that counts now
                self._return()

    def advance(self, answer: Any) -> Grad | None:
        """Go on with an answer until a gradient is wanted; None at the end."""
        while True:
            try:
                return self._run(answer)
            except Stopped:
                self._abandon()
                return None
            except RolledBack:
                self._abandon()
                try:
                    self._return()
                except Stopped:
                    return None
                answer = None

    def give(self, loss: float, g: Vector, size: int) -> Grad | None:
        """The gradient that was asked for."""
        board, rank, worker = self.board, self.rank, self.worker
        worker.loss = board.loss[rank] = loss
        if not self._guarded and not math.isfinite(loss):
            raise LossError(
                f"worker:{rank}, step {worker.t}, update {self.updates}: the loss is {loss}; "
                "a smaller lr (or fewer workers at this lr) is the usual cure"
            )
        if self.journal is not None:
            self.journal.add(GRAD, loss)
            self.journal.flush()  # a window may end with this process, and its gradients count all the same
        board.gradients[rank] += 1
        board.samples[rank] += size
        if not board.get("first_step"):
            board.put("first_step", self.stage.now())
        for hook in self._watching:
            hook.after_gradient(self, loss)
        if self._watching and board.run[STOP]:  # a gradient that a hook has stopped the run for goes no further
            self._abandon()
            return None
        wanted, self._wanted = self._wanted, None
        if wanted is None:
            return self.advance(g)
        wanted.done, wanted.result = True, g
        return self.advance(wanted)

    def returned(self, gradient: Vector) -> bool:
        """Whether no other worker reads a gradient that lies in shared memory any more."""
        place = self.stage.segment.offset(gradient)
        return place is None or (self._means.returned(place) and (self._link is None or self._link.returned(place)))

    def fed(self, batch: Batch) -> Batch:
        """The mini-batch as the hooks want it."""
        for hook in self._feeding:
            batch = hook.feed(self, batch)
        return batch

    def _run(self, answer: Any) -> Grad | None:
        driver, worker, board = self._driver, self.worker, self.board
        while True:
            if not driver.running:
                if not self._between():
                    return None
                driver = self._driver
                driver.begin()
                answer = None
                if self._link is None:
                    self._untouched = self._writes()
            board.busy[self.rank] += 1
            op = driver.advance(answer)
            board.busy[self.rank] += 1
            if op is None:
                if driver.awaits == 0:
                    raise SchemeError(f"worker:{worker.rank}, step {worker.t}: step() ended without awaiting anything")
                worker.t += 1
                board.t[self.rank] = worker.t
                self._untouched = None
                if self.journal is not None:
                    self.journal.add(STEP)
                    if self._link is None and self._met != worker.t - 1:  # no mean will carry it along
                        self.journal.flush()
                self._count()
                self._mirror()
                for hook in self._after:
                    hook.after_step(self)
                continue
            if isinstance(op, Grad):
                return self._asked(op)
            if isinstance(op, Start) and isinstance(op.op, Grad):
                self._wanted = Pending(op.op)
                return self._asked(Grad(op.op.x.clone()))
            self._op = op
            answer = self._performed(op)

    def _asked(self, op: Grad) -> Grad:
        """A gradient, unless the run ends: no server would take it any more."""
        if self.board.run[STOP]:
            raise Stopped
        if self._link is not None:
            self._link.carry_on()
        return op

    def _performed(self, op: Op[Any]) -> Any:
        match op:
            case Call() if self._link is not None:
                return self._link.call(op)
            case Mean():
                return self._means.mean(op, first=self._first_mean())
            case Sleep(seconds):
                return self._pause(seconds)
            case Start(inner):
                return self._start(copied(inner))
            case Pending() if op.done:
                return op.result
            case Pending():
                return self._finished(op)
            case Call():
                raise SchemeError(f"worker:{self.rank} called {op.method.name}(), but its scheme has no server")
            case _:
                raise SchemeError(f"worker:{self.rank}: {type(op).__name__} cannot be awaited")

    def _first_mean(self) -> bool:
        """Whether this step has not been at a mean yet: only there can a newcomer begin the same step beside it."""
        first, self._met = self._met != self.worker.t, self.worker.t
        return first

    def _start(self, op: Op[Any]) -> Pending[Any]:
        pending: Pending[Any] = Pending(op)
        match op:
            case Call() if self._link is not None and op.method.atomic:
                self._started.append((pending, self._link.post(op, ahead=True)))
            case Mean():
                self._started.append((pending, self._means.arrive(op, first=self._first_mean())))
            case Sleep(seconds):
                self._started.append((pending, self.stage.now() + int(seconds * 1e9)))
            case _:
                pending.done, pending.result = True, self._performed(op)
        return pending

    def _finished(self, pending: Pending[Any]) -> Any:
        ticket = next(ticket for one, ticket in self._started if one is pending)
        self._started = [pair for pair in self._started if pair[0] is not pending]
        if isinstance(ticket, Lane):
            assert self._link is not None
            result = self._link.collect(ticket)
        elif isinstance(ticket, int):
            self._pause((ticket - self.stage.now()) / 1e9)
            result = None
        else:
            result = self._means.leave(ticket)
        pending.done, pending.result = True, result
        return result

    def _pause(self, seconds: float) -> None:
        if not (math.isfinite(seconds)):
            raise SchemeError(f"worker:{self.rank} would sleep {seconds} seconds; give a finite number, at least 0")
        if self._link is not None:
            self._link.flush()
        until = self.stage.now() + int(seconds * 1e9)
        while (left := (until - self.stage.now()) / 1e9) > 0:
            self.stage.bells.wait(self._interrupted, left)
            if self._interrupted():
                raise Stopped if self.board.run[STOP] else RolledBack

    def _between(self) -> bool:
        """Between two steps: what the run as a whole wants of this worker. False when it is to end."""
        board, rank, link = self.board, self.rank, self._link
        if board.run[GENERATION] != self._generation:
            raise RolledBack
        self._save_if_asked()
        wanted = board.get("snapshot")
        if wanted > board.saved[rank] and self._snapshot_due(wanted):
            self._keep(wanted)
            if self._exact:
                self._cut(wanted)
        # in this order: a worker that has left because of a stop is not waited for, and its part is an old one
        if self._writing and self._all_saved() and not board.run[STOP]:
            self._write()
        if board.get("halt") and (rank == self.stage.centre_of() if link is None else self.chief):
            self._bring_to_rest()
        goal = board.get("goal")
        if link is None and 0 <= goal <= self.worker.state.v:  # nobody begins what comes after the last update
            self._await_goal(goal)
            if self._rolled_back():  # and what was the last update is not made yet
                raise RolledBack
        counts_itself = link is None or self.stage.direct()
        if board.run[STOP] == RUNNING and counts_itself and 0 <= goal <= self.stage.updates:
            self._set_stop(STOPPING)
        if board.run[STOP] or self._leaving is not None:
            return False
        board.state[rank] = TRAINING
        for hook in self._before:
            hook.before_step(self)
        return not board.run[STOP] and self._leaving is None

    def _await_goal(self, goal: int) -> None:
        """Wait at the last update until every worker has made it: a stop would abandon a step that another worker is
        still in. If nothing moves for `patience`, the others need this worker, and the centre's count decides."""
        stage, patience = self.stage, self.stage.plan.patience
        moved, since = self._motion(), stage.now()

        def reached() -> bool:
            behind = (v < goal and self.board.alive[rank] for rank, v in enumerate(stage.versions()))
            return not any(behind) or self._interrupted()

        while not reached():
            self._means.wait(reached, patience / 4)
            if self._motion() != moved:
                moved, since = self._motion(), stage.now()
            elif stage.now() - since >= patience * 1e9 and stage.updates >= goal:
                return

    def _wait_for(self, ready: Callable[[], bool], what: str) -> None:
        """Wait for others; gives up when the run ends, goes back, or nothing in it has moved for too long."""
        if ready():
            if self._rolled_back():  # a server that goes back calls everything answered
                raise RolledBack
            return
        if self._link is not None:
            self._link.flush()
        if self.meanwhile is not None:
            self.meanwhile()
        board, run, generation, patience = self.board, self.board.run, self._generation, self.stage.plan.patience

        def woken() -> bool:
            return ready() or bool(run[STOP]) or run[GENERATION] != generation or self._means.rung()

        while True:
            board.state[self.rank] = WAITING
            if not self.stage.bells.wait(woken, patience / 4):
                self._outwait(woken, what, patience)
            board.state[self.rank] = TRAINING
            if run[GENERATION] != generation:
                raise RolledBack
            if ready():
                return
            if run[STOP]:
                raise Stopped
            self._means.answer()  # somebody wants something of this worker meanwhile

    def _outwait(self, woken: Callable[[], bool], what: str, patience: float) -> None:
        """Go on waiting as long as anything in the run moves, and for `patience` seconds more."""
        moved, since = self._motion(), self.stage.now() - int(patience / 4 * 1e9)
        while not self.stage.bells.wait(woken, patience / 4):
            if self._motion() != moved:
                moved, since = self._motion(), self.stage.now()
            elif self.stage.now() - since >= patience * 1e9:
                raise Deadlock(
                    f"worker:{self.rank} waited {patience:g} s at {self._driver.line()} for {self._why(what)}"
                )

    def _motion(self) -> tuple[int, ...]:
        """Numbers that change as long as anything in the run moves."""
        board = self.board
        computing = any(board.alive[r] and self._at_work(r) for r in range(board.workers) if r != self.rank)
        # while somebody computes, the run moves, however long a gradient may take
        alive = self.stage.now() if computing else 0
        return (alive, sum(board.gradients), sum(board.t), sum(board.performed), board.get("alarm"))

    def _at_work(self, rank: int) -> bool:
        """Whether a worker computes, or prepares its first step: one that hangs there is the launcher's to find, which
        sees whether it uses the processor. Of other nodes only the former can be seen."""
        board, state = self.board, self.board.state[rank]
        preparing = state == STARTING and self.stage.beside(rank) and not board.sleeping[rank]
        return bool(state == TRAINING or preparing)

    def _why(self, what: str) -> str:
        op = self._op.op if isinstance(self._op, Start | Pending) else self._op
        if isinstance(op, Call):
            return explain(self.stage.scheme, self.stage.server_state(), op)
        if isinstance(op, Mean):
            board = self.board
            missing = [str(r) for r in range(board.workers) if board.at_key[r] != board.at_key[self.rank]]
            return f"a mean; worker {', '.join(missing) or 'nobody'} has not arrived"
        return what

    def _on_device(self) -> State:
        if self.device.type == "cpu":
            return self._state
        cells = {name: self._state.cell(name) for name in self._state}
        return State.over({name: cell.to(self.device) if cell.dim() else cell for name, cell in cells.items()})
