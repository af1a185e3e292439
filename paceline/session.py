"""A worker's run in real processes. The session owns the loop: it drives the scheme's step from one wait to the next,
and gives the one thing it does not do itself, computing a gradient, to whoever holds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline import config, snapshots
from paceline.board import DONE, ENDING, FAILED, GENERATION, RUNNING, STOP, STOPPING, TRAINING, WAITING
from paceline.collectives.shared import SharedMeans
from paceline.control import Control
from paceline.desk import explain
from paceline.drive import Driver
from paceline.errors import Deadlock, LossError, SchemeError
from paceline.hook import Hook
from paceline.ops import Call, Grad, Mean, Op, Pending, Sleep, Start, copied
from paceline.result import Staleness
from paceline.seeds import mixed
from paceline.stage import Stage
from paceline.state import State, Vector
from paceline.task import Batch, Task
from paceline.transports.shared import SAVE, SET, Lane, Link, RolledBack, Stopped
from paceline.worker import Worker

FINAL = 1 << 40  # the number of the last snapshot


class RealSession:
    """One worker among processes. `advance` runs until a gradient is wanted; `give` goes on with it."""

    def __init__(self, stage: Stage, task: Task, rank: int, hooks: Sequence[Hook], control: Control) -> None:
        self.stage, self.task, self.rank, self.control = stage, task, rank, control
        self.board = stage.board
        self.chief = rank == 0
        self._generation = self.board.get("generation")
        self._state = stage.worker_state(rank)
        self.device = torch.device(stage.plan.device)
        self.worker = Worker(rank, stage.plan.workers, self._on_device(), stage.plan.seed)
        self.worker.t = self.board.t[rank]
        if self.worker.t:  # back, or gone on from a checkpoint: not the numbers of the beginning once more
            self.worker.rng.manual_seed(mixed(stage.plan.seed, "worker", rank, "again", self.worker.t))
        self.buffers = stage.buffers(rank)
        self._driver = Driver(stage.scheme, self.worker)
        self._means = SharedMeans(stage, rank, self._wait_for)
        self._link = Link(stage, rank, self._wait_for) if stage.scheme.methods else None
        if self._link is not None:
            self._link.device = self.device
        self._hooks = list(hooks)
        self._begun: list[Hook] = []
        self._feeding = [hook for hook in hooks if type(hook).feed is not Hook.feed]
        self._watching = [hook for hook in hooks if type(hook).after_gradient is not Hook.after_gradient]
        self._guarded = any(hook.guards_loss for hook in hooks)
        self.returns = 0  # to a checkpoint: the loop must take its batches anew
        self._kept: dict[str, Tensor] = {}
        self._found: dict[str, Tensor] = {}
        self._started: list[tuple[Pending[Any], Any]] = []
        self._wanted: Pending[Any] | None = None  # who gets the gradient that is being computed
        self._op: Op[Any] | None = None
        self._leaving: str | None = None
        self._met = -1  # the last step that came to a mean
        self._writing = 0  # the snapshot that the chief has asked for and not yet written

    # what hooks see

    @property
    def updates(self) -> int:
        return self.stage.updates

    @property
    def seconds(self) -> float:
        return self.stage.seconds()

    @property
    def samples(self) -> int:
        return sum(self.board.samples)

    @property
    def staleness(self) -> Staleness:
        return self.stage.staleness()

    @property
    def directory(self) -> Path | None:
        return Path(self.stage.plan.directory)

    def model(self) -> Vector:
        return snapshots.steady(self.stage)

    def evaluate(self, x: Vector | None = None) -> dict[str, float]:
        buffers = snapshots.buffers_of(self.stage, self.task.buffer_policy)
        vector = self.model() if x is None else x
        return self.task.evaluate(vector.to(self.device), buffers or None)

    def say(self, text: str) -> None:
        print(text, flush=True)  # into the role's log
        self.control.send({"say": text})

    def record(self, values: dict[str, float]) -> None:
        self.control.send({"record": {"update": self.updates, "seconds": self.seconds, **values}})

    def stop(self, reason: str) -> None:
        if self.board.run[STOP] == RUNNING:
            self.control.send({"stopped": reason})
            self._set_stop(STOPPING)

    def leave(self, reason: str) -> None:
        self._leaving = reason

    def save(self) -> None:
        if not self.chief or self._writing:
            return
        board = self.board
        self._writing = board.get("snapshot") + 1
        if self._link is None:
            # every worker passes this version between two steps, and none can be past it yet
            board.put("snapshot_version", self.worker.state.v + 2)
        board.put("snapshot", self._writing)

    def keep(self, name: str, tensor: Tensor) -> None:
        self._kept[name] = tensor.detach().cpu()

    def kept(self, name: str) -> Tensor | None:
        return self._found.get(name)

    def set(self, **hyper: Any) -> None:
        self.stage.scheme = config.scheme_of(self.stage.scheme, hyper)
        self.stage.scheme.check(self.stage.plan.workers)
        self._driver.scheme = self.stage.scheme
        if self.chief and self._link is not None:
            flat = [part for pair in hyper.items() for part in pair]
            self._link.special(SET, *flat)
        elif self.chief:
            self.stage.save_overrides(self.stage.load_overrides() | hyper)

    def wait(self, condition: Callable[[], bool], what: str, *, away: bool = False) -> None:
        if condition():
            return
        if away:
            self.board.alive[self.rank] = 0
            self.stage.bells.ring_all()
        while not condition():  # others do not ring for what a hook waits for: look now and then
            self.stage.bells.wait(lambda: bool(condition() or self._interrupted()), 0.02)
            if self._interrupted() and not condition():
                raise Stopped
        if away:
            self._join()

    def begun(self) -> int:
        return sum(self.board.begun)

    # the loop

    def begin(self) -> Grad | None:
        """Take part: hooks begin, and the first gradient is asked for."""
        try:
            if not self.board.alive[self.rank]:
                self._join()
            self.board.begun[self.rank] = 1
            self.stage.bells.ring_all()
            for hook in self._hooks:
                self._begun.append(hook)
                hook.begin(self)
        except Stopped:
            return None
        except RolledBack:
            return self.advance(self._return())
        return self.advance(None)

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
            board.busy[self.rank] += 1
            op = driver.advance(answer)
            board.busy[self.rank] += 1
            if op is None:
                if driver.awaits == 0:
                    raise SchemeError(f"worker:{worker.rank}, step {worker.t}: step() ended without awaiting anything")
                worker.t += 1
                board.t[self.rank] = worker.t
                self._mirror()
                for hook in self._hooks:
                    hook.after_step(self)
                continue
            if isinstance(op, Grad):
                return op
            if isinstance(op, Start) and isinstance(op.op, Grad):
                self._wanted = Pending(op.op)
                return Grad(op.op.x.clone())
            self._op = op
            answer = self._performed(op)

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
                self._started.append((pending, self._link.post(op)))
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
            result = self._pause((ticket - self.stage.now()) / 1e9)
        else:
            result = self._means.leave(ticket)
        pending.done, pending.result = True, result
        return result

    def _pause(self, seconds: float) -> None:
        if not (math.isfinite(seconds)):
            raise SchemeError(f"worker:{self.rank} would sleep {seconds} seconds; give a finite number, at least 0")
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
        wanted = board.get("snapshot")
        if wanted > board.saved[rank] and (link is not None or self.worker.state.v >= board.get("snapshot_version")):
            self._keep(wanted)
        if self._writing and self._all_saved():
            self._write()
        goal = board.get("goal")
        if board.run[STOP] == RUNNING and 0 <= goal and (link is None or self.stage.direct()) and self.updates >= goal:
            self._set_stop(STOPPING)
        if board.run[STOP] or self._leaving is not None:
            return False
        board.state[rank] = TRAINING
        board.heard[rank] = self.stage.now()
        for hook in self._hooks:
            hook.before_step(self)
        return not board.run[STOP] and self._leaving is None

    def _keep(self, number: int) -> None:
        self._mirror()
        snapshots.keep_worker(self.stage, self.rank, self.worker._rng)
        self.board.saved[self.rank] = number

    def _all_saved(self) -> bool:
        board = self.board
        return all(
            board.saved[rank] >= self._writing or not board.alive[rank] for rank in range(self.stage.plan.workers)
        )

    def _write(self) -> None:
        """Everybody's part lies aside: the servers add theirs, then it goes to disk."""
        self._writing = 0
        if self._link is not None:
            self._link.special(SAVE)
        if self.board.run[GENERATION] == self._generation:
            snapshots.write(self.stage, self.task.buffer_policy, self._kept)

    # waiting

    def _interrupted(self) -> bool:
        run = self.board.run
        return bool(run[STOP] or run[GENERATION] != self._generation)

    def _wait_for(self, ready: Callable[[], bool], what: str) -> None:
        """Wait for others; gives up when the run ends, goes back, or nothing in it has moved for too long."""
        if ready():
            return
        board, run, generation, patience = self.board, self.board.run, self._generation, self.stage.plan.patience

        def woken() -> bool:
            return ready() or bool(run[STOP]) or run[GENERATION] != generation

        board.state[self.rank] = WAITING
        moved = self._motion()
        since = self.stage.now()
        while not self.stage.bells.wait(woken, patience / 4):
            if self._motion() != moved:
                moved, since = self._motion(), self.stage.now()
            elif self.stage.now() - since >= patience * 1e9:
                raise Deadlock(
                    f"worker:{self.rank} waited {patience:g} s at {self._driver.line()} for {self._why(what)}"
                )
        board.state[self.rank] = TRAINING
        if run[GENERATION] != generation:
            raise RolledBack
        if not ready():
            raise Stopped

    def _motion(self) -> tuple[int, ...]:
        """Numbers that change as long as anything in the run moves."""
        board = self.board
        computing = sum(board.alive[r] and board.state[r] == TRAINING and r != self.rank for r in range(board.workers))
        # while somebody computes, the run moves, however long a gradient may take
        alive = self.stage.now() if computing else 0
        return (alive, sum(board.gradients), sum(board.t), sum(board.performed), board.get("alarm"))

    def _why(self, what: str) -> str:
        op = self._op.op if isinstance(self._op, Start | Pending) else self._op
        if isinstance(op, Call):
            return explain(self.stage.scheme, self.stage.server_state(), op)
        if isinstance(op, Mean):
            board = self.board
            missing = [str(r) for r in range(board.workers) if board.at_key[r] != board.at_key[self.rank]]
            return f"a mean; worker {', '.join(missing) or 'nobody'} has not arrived"
        return what

    # coming, going back, going

    def _join(self) -> None:
        """Be counted again. Where there is no server, take over the cells of a worker that stands still."""
        board, rank, stage = self.board, self.rank, self.stage
        if self._link is None:
            board.joining[rank] = 1
            stage.bells.ring_all()
            others = [other for other in range(board.workers) if other != rank]

            def nobody() -> bool:
                return not any(board.alive[other] for other in others)

            while not board.grant[rank] and not nobody():
                stage.bells.wait(
                    lambda: bool(board.grant[rank] or nobody() or board.run[STOP] or self._rolled_back()), 0.5
                )
                if board.run[STOP]:
                    board.joining[rank] = 0
                    raise Stopped
            self._take_over(board.grant[rank] - 1 if board.grant[rank] else None)
            board.joining[rank] = board.grant[rank] = 0
        board.busy[rank] += board.busy[rank] % 2
        board.alive[rank] = 1
        stage.bells.ring_all()

    def _rolled_back(self) -> bool:
        return bool(self.board.run[GENERATION] != self._generation)

    def _take_over(self, donor: int | None) -> None:
        board, rank, stage = self.board, self.rank, self.stage
        if donor is None:  # nobody is left: the newest whole cells, or the last checkpoint
            whole = [r for r in range(board.workers) if not board.busy[r] % 2]
            if not whole:
                saved = snapshots.find(stage, board.get("checkpoint"))
                lost = self._state.v
                snapshots.restore_worker(stage, rank, saved)
                board.put("rolled_back", board.get("rolled_back") + max(lost - self._state.v, 0))
                self._refresh()
                return
            donor = max(whole, key=lambda r: int(stage.tensor(f"worker.{r}.v")))
        if donor != rank:
            self._state.restore(stage.worker_state(donor).saved())
            board.t[rank] = board.t[donor]
            for name, buffer in stage.buffers(donor).items():
                self.buffers[name].copy_(buffer)
        self._refresh()

    def _refresh(self) -> None:
        """The shared cells have changed under this worker."""
        self.worker.t = self.board.t[self.rank]
        if self.worker.state is not self._state:
            self.worker.state.restore(self._state.saved())

    def _abandon(self) -> None:
        self._driver.close()
        self._means.forget()
        if self._link is not None:
            self._link.forget()
        self._started.clear()
        self._wanted = None
        board = self.board
        board.busy[self.rank] += board.busy[self.rank] % 2

    def _return(self) -> None:
        """The run has gone back to a checkpoint: so does this worker."""
        board, stage = self.board, self.stage
        self._generation = generation = board.get("generation")
        self._writing = 0
        saved = snapshots.find(stage, board.get("restore"))
        stage.bells.wait(
            lambda: all(one == generation for one in board.server_generation) or bool(board.run[STOP]), None
        )
        if board.run[STOP]:
            raise Stopped
        snapshots.restore_worker(stage, self.rank, saved)
        self._refresh()
        self._driver = Driver(stage.scheme, self.worker)
        self.returns += 1

    def _set_stop(self, why: int) -> None:
        board = self.board
        board.put("stopped", self.stage.now())
        board.put("stop", why)
        self.stage.bells.ring_all()

    def finish(self) -> None:
        """Say goodbye. The chief goes last: it waits for the others, writes the last checkpoint, and tells the result."""
        board, rank, bells = self.board, self.rank, self.stage.bells
        self._abandon()
        board.state[rank] = ENDING
        self._keep(FINAL)
        others = [other for other in range(board.workers) if other != rank]
        if not self.chief:
            self._end_hooks()
            board.alive[rank] = 0
            board.state[rank] = DONE
            board.gone[rank] = 1
            bells.ring_all()
            return
        if board.run[STOP] == RUNNING:  # it has left by itself: barriers must not wait for it
            board.alive[rank] = 0
            bells.ring_all()
            bells.wait(lambda: bool(board.run[STOP]) or all(board.gone[other] for other in others))
            board.alive[rank] = 1
            if board.run[STOP] == RUNNING:
                self._set_stop(STOPPING)
        bells.wait(lambda: all(board.gone[other] for other in others))
        if board.run[STOP] != FAILED:
            if self._rolled_back():
                self._return()
                self._keep(FINAL)
            if self._link is not None:
                self._last_word()
            self._end_hooks()
            snapshots.write(self.stage, self.task.buffer_policy, self._kept)
            self.control.send({"result": self._result()})
        else:
            self._end_hooks()
        board.put("over", 1)
        board.state[rank] = DONE
        board.alive[rank] = 0
        board.gone[rank] = 1
        bells.ring_all()

    def _last_word(self) -> None:
        """The servers' part of the last checkpoint; the stop has been heard, so this wait does not heed it."""
        assert self._link is not None
        link, lane = self._link, self._link.ask(SAVE)
        self.stage.bells.wait(lambda: link.ready(lane) or self.board.run[STOP] == FAILED)

    def _result(self) -> dict[str, Any]:
        staleness = self.staleness
        return {
            "updates": self.updates,
            "gradients": sum(self.board.gradients),
            "samples": sum(self.board.samples),
            "metrics": self.evaluate(),
            "dropped": self.stage.dropped(),
            "staleness": {
                "mean": staleness.mean,
                "max": staleness.max,
                "histogram": {str(k): n for k, n in staleness.histogram.items()},
                "outstanding": staleness.outstanding,
            },
        }

    def failed(self, error: BaseException) -> None:
        """The run broke off here: hooks hear of it, and everybody else ends."""
        with ExitStack() as rest:
            rest.callback(self._end_hooks)
            for hook in self._begun:
                rest.callback(hook.failed, self, error)

    def _end_hooks(self) -> None:
        hooks, self._begun = self._begun, []
        with ExitStack() as ends:  # every end runs, in reverse order, whatever another one raises
            for hook in hooks:
                ends.callback(hook.end, self)

    # the device

    def _on_device(self) -> State:
        if self.device.type == "cpu":
            return self._state
        cells = {name: self._state.cell(name) for name in self._state}
        return State.over({name: cell.to(self.device) if cell.dim() else cell for name, cell in cells.items()})

    def _mirror(self) -> None:
        """What lies on another device is gone with the process: keep the cells of a finished step in shared memory."""
        if self.worker.state is not self._state:
            for name in self._state:
                if self._state.cell(name).dim():
                    self._state.cell(name).copy_(self.worker.state.cell(name))
