"""A worker's run in real processes. The session drives the scheme's step from one wait to the next; the caller computes
the gradients.

    WorkerSession      the loop
      WorkerCells      the worker's state, in shared memory and on its device
      Waiting          waits for other processes
      CallClient       calls to the servers            Means: means among workers
      StepOperations   performs what a step awaits, with these
      RunLog           what the worker did, for a replay
      Checkpointing    its part in checkpoints
      Membership       joins, returns to a checkpoint, leaves
      HookSession      what hooks get, made of all these
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import inf, isfinite, nan
from time import monotonic_ns
from typing import Any

from paceline.config import discovery
from paceline.hook import Hook
from paceline.ops import Call, Grad, Mean, Meet, Op, Pending, Sleep, Start
from paceline.processes.calls.client import CallClient, RolledBack, Stopped
from paceline.processes.calls.locked_client import LockedClient
from paceline.processes.memory import snapshot
from paceline.processes.memory.board import ENDING, FAILED, GENERATION, GOAL, HALT, RUNNING, STOP, STOPPING, TRAINING
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.roles import profiling
from paceline.processes.roles.checkpointing import FINAL, Checkpointing
from paceline.processes.roles.control_channel import Control
from paceline.processes.roles.current_work import show_compilation
from paceline.processes.roles.evaluator import Evaluation
from paceline.processes.roles.hook_session import HookSession
from paceline.processes.roles.membership import Membership
from paceline.processes.roles.recorder import GRAD, RunLog
from paceline.processes.roles.stopwatch import Category
from paceline.processes.roles.waiting import StepOperations, Waiting
from paceline.processes.roles.worker_cells import WorkerCells
from paceline.processes.transport import StreamedGradients
from paceline.runs.times_log import Spent, code
from paceline.runtime.gradient_norm import GradientNorm
from paceline.runtime.hook_calls import HookCalls
from paceline.runtime.step_driver import StepDriver
from paceline.state import Vector
from paceline.task import Task
from paceline.worker import Worker

SPENT = {Mean: code(Spent.MEAN), Meet: code(Spent.MEETING), Sleep: code(Spent.SLEEP)}  # what an operation is noted as
STARTED = {Mean: code(Spent.STARTED), Meet: code(Spent.STARTED, 1)}
GRADIENT = code(Spent.GRADIENT)

# past Worker.__setattr__, which looks for a cell of that name
_set_loss, _set_step = vars(Worker)["loss"].__set__, vars(Worker)["t"].__set__


class WorkerSession:
    """One worker among processes. `advance` runs until a gradient is wanted; `give` takes the gradient."""

    def __init__(
        self,
        memory: RunMemory,
        task: Task,
        rank: int,
        hooks: Sequence[Hook],
        control: Control,
        turn: AbstractContextManager[Any] | None = None,
        calls: CallClient | None = None,
    ) -> None:
        """`turn` is held while the task computes: workers of one process share its model. `calls`: other than those to
        servers in processes of their own."""
        self.memory, self.board, self.control = memory, memory.board, control
        self.rank, self.chief = rank, rank == 0
        self.profile = profile = profiling.of_worker(memory, rank, hooks)
        # a lock that no other thread wants is entered faster than a context that does nothing
        self.turn = profile.turn(turn) if turn is not None else threading.RLock()
        policy = task.buffer_policy
        self.cells = cells = WorkerCells(memory, rank)
        self.worker = cells.worker
        self._driver = driver = StepDriver(memory.scheme, cells.worker, into_cells=True)
        traffic, board = driver.traffic, memory.board
        traffic.sent, traffic.received = board.sent[rank], board.received[rank]  # of the process before
        traffic.uncompressed = board.uncompressed[rank]
        self._advance = profile.timed(Category.UPDATE, driver.advance)
        self.waiting = waiting = profile.waits(Waiting(memory, rank, driver))
        self._means = means = discovery.collective(memory.plan.collective).means(memory, rank, waiting.wait_for)
        profile.means(means)
        if calls is None and memory.scheme.methods:
            calls = (LockedClient if memory.locked_calls() else CallClient)(memory, rank, waiting.wait_for)
        if calls is not None:
            calls.device = cells.device
            profile.calls(calls)
        self._calls = calls
        ways = [means, calls.remote if calls is not None else None]
        self.streamed = [way for way in ways if isinstance(way, StreamedGradients)]
        waiting.serve(calls, means)
        self._operations = operations = StepOperations(memory, cells.worker, calls, means, waiting)
        self.log = log = RunLog(memory, rank, cells, waiting)
        profile.journal(log.journal)
        self._messages = messages = operations.messages
        if messages is not None:
            messages.journal = log.journal
        self._record = log.journal.record if log.journal is not None else None
        self._stamp = waiting.stamp = log.stamp
        self._calls_spent = {name: code(Spent.CALL, k) for k, name in enumerate(sorted(memory.scheme.methods))}
        self._asked_at = 0  # when the gradient was asked for that is being computed
        self._checkpoints = checkpoints = profile.checkpoints(
            Checkpointing(memory, policy, cells, calls, waiting, log, control)
        )
        self.membership = membership = Membership(
            memory, cells, calls, means, driver, operations, waiting, checkpoints, log
        )
        self._evaluation = evaluation = Evaluation(task, cells.device, self.turn)
        self._norm = norm = GradientNorm()
        self.view = HookSession(
            memory, cells, policy, calls, driver, waiting, membership, checkpoints, log, evaluation, control, norm
        )
        self.hooks = profile.hooks(HookCalls([*hooks, *profile.own_hooks()], self.view))
        self._stepping = self.hooks.stepping
        self._wanted: Pending[Any] | None = None  # what gets the gradient that is being computed
        self._counts = calls is None or memory.direct()  # no server counts the updates and ends the run
        self._computed = False  # a gradient: the board has the time of the first one

    def begin(self) -> Grad | None:
        """Take part: hooks begin, and the first gradient is asked for."""
        self.profile.start()
        show_compilation(self.board, self.rank)
        try:
            self.membership.enter()
            self.board.begun[self.rank] = 1
            self.memory.wakeup.ring_all()
            while True:
                try:
                    self.hooks.begin()
                    break
                except RolledBack:  # a hook's call to a server is void: the hook begins once more
                    self.membership.return_to_checkpoint()
        except Stopped:
            return None
        return self.advance(None)

    def advance(self, answer: Any) -> Grad | None:
        """Give the step an answer, and run until a gradient is wanted; None at the end."""
        while True:
            try:
                return self._run(answer)
            except Stopped:
                self.membership.abandon()
                return None
            except RolledBack:
                self.membership.abandon()
                try:
                    self.membership.return_to_checkpoint()
                except Stopped:
                    return None
                answer = None

    def give(self, loss: float | None, g: Vector, size: int) -> Grad | None:
        """Take the gradient that was asked for, of `size` samples. `loss`: None if the caller does not know it."""
        board, rank = self.board, self.rank
        board.loss[rank] = shown = nan if loss is None else loss
        _set_loss(self.worker, shown)
        if loss is not None and not isfinite(loss):
            self.hooks.check_loss(loss)
        if self._stamp is not None:
            self._stamp(GRADIENT, self._asked_at)
        if self._record is not None:
            self._record(GRAD, shown)  # now: a window may end with this process, and its gradients count all the same
        board.gradients[rank] += 1
        board.samples[rank] += size
        if not self._computed:
            self._computed = True
            if not board.get("first_step"):
                board.put("first_step", self.memory.now())
        if self._norm.asked:
            self._norm.measure(g)
        if self.hooks.watching:
            self.hooks.after_gradient(loss)
            if board.run[STOP]:  # a gradient that a hook has stopped the run for is not used
                self.membership.abandon()
                return None
        return self.advance(g) if self._wanted is None else self._answered(g)

    def stopped(self) -> Grad | None:
        """The gradient that was asked for has been given up: the step gets None for it."""
        if self._stamp is not None:
            self._stamp(Spent.STOPPED, self._asked_at)
        self.log.stopped()
        return self._answered(None)

    def useless(self, request: Grad) -> Callable[[], bool] | None:
        """What tells whether a gradient has become useless; None if it is wanted in any case. The server's version is
        in shared memory; other nodes are told when it changes."""
        memory, until, within = self.memory, request.until, request.within
        if until is None and within is None:
            return None
        due = inf if within is None else memory.now() + within * 1e9

        def useless() -> bool:
            return (until is not None and memory.updates >= until) or (due < inf and memory.now() >= due)

        return useless

    def _answered(self, g: Vector | None) -> Grad | None:
        wanted, self._wanted = self._wanted, None
        if wanted is None:
            return self.advance(g)
        wanted.done, wanted.result = True, g
        return self.advance(wanted)

    def returned(self, place: int) -> bool:
        """Whether no other process reads the gradient at an offset of shared memory any more."""
        calls = self._calls
        return self._means.returned(place) and (calls is None or calls.returned(place))

    def _run(self, answer: Any) -> Grad | None:
        driver, busy, rank, advance = self._driver, self.board.busy, self.rank, self._advance
        running, stamp, perform = driver.running, self._stamp, self._operations.perform
        while True:
            if not running:
                if not self._between():
                    return None
                driver.begin()
                answer, running = None, True
                if self._calls is None:
                    self.cells.begin_step()
                if self._messages is not None:
                    self._messages.begin_step()
            busy[rank] += 1
            op = advance(answer)
            busy[rank] += 1
            if op is None:
                self._end_step()
                running = False
                continue
            if type(op) is Grad:
                return self._asked(op)
            if isinstance(op, Start) and isinstance(op.op, Grad):
                self._wanted = Pending(op.op)
                return self._asked(Grad(op.op.x.clone(), op.op.until, op.op.within))
            self.waiting.op = op
            began = monotonic_ns()
            answer = perform(op)
            self.waiting.op = None  # it may hold a gradient, whose buffer is wanted for the next one
            if stamp is not None and (what := self._spent_by(op)):
                stamp(what, began)

    def _spent_by(self, op: Op[Any]) -> int:
        """What the time of an operation is noted as; 0: it is not."""
        if type(op) is Start:
            return STARTED.get(type(op.op), 0)
        done = op.op if type(op) is Pending else op
        if type(done) is Call:
            return self._calls_spent[done.method.name]
        if (type(done) is Mean or type(done) is Meet) and done.among:
            return code(Spent.MEAN if type(done) is Mean else Spent.MEETING, 1 + min(done.among))
        return SPENT.get(type(done), 0)

    def _end_step(self) -> None:
        step, messages = self.worker.t, self._messages
        if messages is not None:
            self.log.step(flush=True)  # before others can see the messages of the step
        self.board.t[self.rank] = step + 1
        if messages is not None:
            messages.end_step(step)
        _set_step(self.worker, step + 1)
        self._count_bytes()
        if messages is None:  # without a server the step's mean carries the record along, if it had one
            self.log.step(flush=self._calls is None and self._operations.last_mean != step)
        self.cells.end_step()
        if self._stepping:
            self.hooks.after_step()

    def _count_bytes(self) -> None:
        board, rank, traffic = self.board, self.rank, self._driver.traffic
        board.sent[rank], board.received[rank] = traffic.sent, traffic.received
        board.uncompressed[rank] = traffic.uncompressed

    def _asked(self, op: Grad) -> Grad:
        """A gradient, unless the run ends: no server would take it any more."""
        if self.board.run[STOP]:
            raise Stopped
        if self._calls is not None:
            self._calls.carry_on()
        self._asked_at = monotonic_ns()
        return op

    def _between(self) -> bool:
        """Between two steps: do what the run as a whole wants of this worker. False when it is to end."""
        board, run, membership = self.board, self.board.run, self.membership
        if run[GENERATION] != self.waiting.generation:
            raise RolledBack
        self._checkpoints.between_steps()
        if run[HALT] or (self._counts and self._near(run[GOAL])):
            self._stop_at_goal()
        if run[STOP] or membership.leaving:
            return False
        board.state[self.rank] = TRAINING
        if not self._stepping:
            return True
        self.hooks.before_step()
        return not run[STOP] and not membership.leaving

    def _near(self, goal: int) -> bool:
        """Whether the last update may have been made, by this worker or by the run."""
        return goal >= 0 and (goal <= self.worker.state.v or goal <= self.memory.updates)

    def _stop_at_goal(self) -> None:
        """Stop the run after its last update, where no server does."""
        board, memory, waiting, serverless = self.board, self.memory, self.waiting, self._calls is None
        while True:
            if board.get("halt") and (self.rank == memory.centre_of() if serverless else self.chief):
                self._set_goal()
            goal = board.get("goal")
            if not serverless or not 0 <= goal <= self.worker.state.v:
                break
            waiting.wait_for_goal(goal)  # no worker begins what comes after the last update
            if waiting.rolled_back():  # the last update is still to be made
                raise RolledBack
            if board.run[STOP] or (goal == board.get("goal") and not board.get("halt")):
                break
        if self._counts and board.run[STOP] == RUNNING and 0 <= goal <= memory.updates:
            memory.stop(STOPPING)

    def _set_goal(self) -> None:
        """The run is to end: after the next update, which no worker can have passed without this one. While `halt` is
        set, no worker ends at the goal: where a worker may be ahead, the goal may have to be later."""
        board, memory, last, margin = self.board, self.memory, self.cells.updates + 1, 2
        given = board.get("goal")
        while True:
            if memory.scheme.decentralised:  # there a worker may be ahead
                last = max(self._checkpoints.ahead()) + margin
            if 0 <= given <= last:
                board.put("goal", given)
                break
            board.put("goal", last)
            self._checkpoints.announce()
            if not self._checkpoints.overtaken(last):
                break
            margin *= 2
        board.put("halt", 0)
        memory.wakeup.ring_all()

    def finish(self) -> None:
        """Leave the run. The chief leaves last: it writes the last checkpoint and reports the result."""
        board, rank, membership = self.board, self.rank, self.membership
        self.profile.stop()
        if self._messages is not None and membership.leaving:
            self._messages.settle()
        membership.abandon()
        self.log.end()
        self.cells.uncount()
        board.state[rank] = ENDING
        self._checkpoints.keep_last()
        board.parted[rank] = 1
        if not self.chief:
            self.hooks.end()
            membership.leave()
            return
        if membership.wait_for_the_last() and self._calls is None:
            membership.take_over(None)  # the others have trained without it
            self.memory.replaced.add(self.rank)
            self.log.cells()
            self._checkpoints.keep(FINAL)
        failed = board.run[STOP] == FAILED
        if not failed:
            self._checkpoints.keep_servers()
            board.put("closing", 1)
        self.hooks.end()
        if not failed:
            self._report_result()
        board.put("over", 1)
        membership.leave()

    def _report_result(self) -> None:
        send = self.control.send
        if self._checkpoints.complete():
            self._checkpoints.write_last()
            send({"result": {"metrics": {}}})  # in case the launcher does not wait for the evaluation
            send({"result": {"metrics": self.view.evaluate()}})
            return
        saved = snapshot.find(self.memory, self.board.get("checkpoint"))
        text = "the run was stopped inside a step, and its workers have no common one"
        send({"warn": f"{text}: what is saved is the checkpoint of update {saved.step:,}"})
        send({"result": {"metrics": {}}})
        send({"result": {"metrics": self._evaluation.of_checkpoint(saved)}})
