"""The one program of every role: chief, worker, server, evaluator. A launcher starts it with all that it needs."""

from __future__ import annotations

import copy
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline import errors
from paceline.config import build
from paceline.config.endpoint import ALONE, Endpoint
from paceline.config.from_plan import UNDECIDED, scheme_of, task_of
from paceline.config.plan import Plan
from paceline.errors import PacelineError, RunError, UsageError
from paceline.hook import Hook
from paceline.hooks.checkpoint_saver import CheckpointSaver
from paceline.hooks.summary_saver import SummarySaver
from paceline.hooks.validation import Validation
from paceline.processes import resource_limits
from paceline.processes.memory import snapshot
from paceline.processes.memory.board import FAILED, STOP, STOPPING, Board
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.memory.wakeup import Wakeup
from paceline.processes.roles import cpu_scheduling, evaluator, script_role, worker_threads
from paceline.processes.roles.control_channel import Control
from paceline.processes.roles.server import Server
from paceline.processes.roles.worker_session import WorkerSession
from paceline.runs import checkpoint
from paceline.runs.run_directory import RunDirectory
from paceline.scheme import Scheme
from paceline.task import Batch, Task
from paceline.torch_task import TorchTask

KINDS = ("chief", "worker", "server", "evaluator")
ALL_MEANT = 2.0  # seconds within which a launcher writes down that it has been asked to end


@dataclass(frozen=True)
class Role:
    """Which role a process has."""

    kind: str
    index: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind in ("chief", "evaluator") else f"{self.kind}:{self.index}"

    @property
    def file(self) -> str:
        """The name of its log."""
        return str(self).replace(":", "-")


@dataclass
class RoleContext:
    """What a launcher hands to a role: the plan, shared memory, bells, and a way to talk back."""

    plan: Plan
    board: Board
    wakeup: list[int]
    state: int  # the descriptor of the memory for the state
    objects: dict[str, Any] = field(default_factory=dict)  # task, scheme, hooks that have no name
    node: Endpoint = ALONE


def roles_of(plan: Plan, scheme: Scheme) -> list[Role]:
    """Every role of a run."""
    if plan.script and plan.evaluator:
        raise UsageError(
            "a script cannot have an evaluator: only the script knows its data; "
            "give attach(evaluate=…) a function, and the hook validation to have the chief call it"
        )
    parts = [Role("worker" if index else "chief", index) for index in range(plan.hosts)]
    parts += [Role("server", shard) for shard in range(servers_of(plan, scheme))]
    return [*parts, Role("evaluator")] if plan.evaluator else parts


def ranks(part: Role, plan: Plan) -> range:
    """The workers that live in a process: one, or with `exact` as many as it takes."""
    return range(part.index, plan.workers, plan.hosts) if part.kind in ("chief", "worker") else range(0)


def servers_of(plan: Plan, scheme: Scheme) -> int:
    """How many servers are started. A script may yet choose a scheme that needs them; they go if it does not."""
    return plan.servers if scheme.methods or scheme is UNDECIDED else 0


def places(part: Role, plan: Plan) -> list[int]:
    """The numbers of all bells of a process: a worker's, or those of all workers that live in it."""
    return list(ranks(part, plan)) or [place(part, plan)]


def place(part: Role, plan: Plan) -> int:
    """The number of a role's bell."""
    if part.kind == "evaluator":
        return plan.workers + plan.servers
    return part.index + (plan.workers if part.kind == "server" else 0)


def hooks_of(plan: Plan, objects: dict[str, Any], kind: str) -> list[Hook]:
    """The hooks that this role runs, those that every run has among them."""
    hooks = [build.hook_of(hook) for hook in plan.hooks] + list(objects.get("hooks", ()))
    if not any(isinstance(hook, CheckpointSaver) for hook in hooks):
        if plan.checkpoint_steps:
            hooks.append(CheckpointSaver(every=plan.checkpoint_steps))
        elif plan.checkpoint_seconds:
            hooks.append(CheckpointSaver(seconds=plan.checkpoint_seconds))
    if plan.summaries and not any(isinstance(hook, SummarySaver) for hook in hooks):
        hooks.append(SummarySaver(seconds=1.0))
    if plan.every:
        hooks.insert(0, Validation(every=plan.every))
    return [hook for hook in hooks if kind in hook.roles]


def main(part: Role, context: RoleContext, control: Control) -> int:
    """Play a role to its end; gives the exit code."""
    plan, board = context.plan, context.board
    torch.set_num_threads(plan.threads)
    if context.node.secret is None:  # elsewhere engines signal every process, and SIGTERM stays ignored
        signal.signal(signal.SIGTERM, lambda *_: _terminated(board))
    try:
        wakeup = Wakeup(board, context.wakeup, place(part, plan))
        memory = RunMemory(plan, scheme_of(plan, context.objects), board, wakeup, context.state, context.node)
        crowded = len(os.sched_getaffinity(0)) < plan.hosts + board.servers
        if crowded:
            (cpu_scheduling.serve if part.kind == "server" else cpu_scheduling.compute)()
        if part.kind == "server":
            wait_until_ready(memory)
            if memory.scheme.methods:
                Server(memory, part.index).run()
        elif part.kind == "evaluator":
            wait_until_ready(memory)
            device = memory.device(plan.hosts, plan.eval_device or "cpu")  # the next GPU behind the workers'
            evaluator.follow(memory, _on(task_of(plan, context.objects), device), device, control)
        elif plan.script:
            own = list(context.objects.get("hooks", ()))
            script_role.play(
                memory, part.index, lambda given: hooks_of(plan, {"hooks": own + given}, part.kind), control
            )
        elif not _work(memory, part, context, control):
            return 1
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return 0
        _report(part, context, control, error)
        return 1
    return 0


def _terminated(board: Board) -> None:
    """This process has got a SIGTERM. If all were meant, the launcher has been asked too, and ends the run in order. If
    not, this process dies, and the launcher restarts it. A second signal does not wait."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def decide() -> None:
        if not board.get("interrupted"):
            os.kill(os.getpid(), signal.SIGTERM)

    timer = threading.Timer(ALL_MEANT, decide)
    timer.daemon = True
    timer.start()


def _report(part: Role, context: RoleContext, control: Control, error: BaseException, rank: int | None = None) -> None:
    """Tell the launcher, and let everybody else end."""
    traceback.print_exc()
    sys.stderr.flush()
    board = context.board
    place = str(part)
    if part.kind in ("chief", "worker"):
        place += f", step {board.t[part.index if rank is None else rank]}"
    own = isinstance(error, PacelineError)
    text = str(error) if own else resource_limits.explained(error) or f"{type(error).__name__}: {error}"
    if part.kind == "evaluator" and not isinstance(error, UsageError):  # training does not need it
        control.send({"failure": text})
        return
    kind = type(error).__name__ if own else "RunError"
    notes = list(getattr(error, "__notes__", ()))
    if not own:
        last = traceback.extract_tb(error.__traceback__)[-1:]
        notes += [f"at {frame.filename}:{frame.lineno}: {frame.line}" for frame in last]
    notes.append(f"the whole story is in logs/{part.file}.log")
    control.send({"error": {"kind": kind, "where": place, "text": text, "notes": notes}})
    board.stop(FAILED)
    for descriptor in range(board.roles):
        Wakeup(board, context.wakeup, descriptor).ring(descriptor)


def wait_until_ready(memory: RunMemory) -> None:
    """The chief lays everything out; the others wait for it, however long its data take."""
    board = memory.board
    memory.wakeup.wait(lambda: bool(board.get("ready") or board.run[STOP]))
    if not board.get("ready"):
        raise SystemExit(0)
    memory.open()


def wait_until_joined(memory: RunMemory) -> None:
    """Nobody begins a step before all workers and servers are there: one rule of start for every scheme."""
    board = memory.board
    memory.wakeup.wait(lambda: bool(board.get("joined") or board.run[STOP]))


def prepare(memory: RunMemory, task: Task, x0: Any, notes: dict[str, Any], control: Control) -> None:
    """The chief's first duty: lay out the state and fill it, from the start or from the newest checkpoint."""
    plan, board = memory.plan, memory.board
    for text in memory.scheme.warnings(plan.workers, task.curvature() if plan.curvature is None else plan.curvature):
        control.send({"warn": text})
    memory.lay_out(x0, task.buffers(), notes)
    directory = RunDirectory.open(plan.directory).checkpoints
    saved = checkpoint.resumed_from(directory, lambda text: control.send({"warn": text}))
    if saved is not None:
        snapshot.check(plan, memory.scheme, saved)
        if plan.exact and not saved.numbers.get("cut"):
            text = "its workers stood at different steps: the bits will not be those of an unbroken run"
            control.send({"warn": f"the checkpoint of update {saved.step:,} is not exact, {text}"})
        for shard in range(plan.servers if memory.scheme.methods else 0):
            snapshot.restore_shard(memory, shard, saved)
        for rank in range(plan.workers):
            snapshot.restore_worker(memory, rank, saved)
        for rank, present in enumerate(saved.numbers["present"]):
            board.known[rank] = present
        memory.save_overrides(saved.numbers["overrides"])
        board.put("checkpoint", saved.step)
        board.put("written", memory.now())  # it is as good as new: training has only begun to go beyond it
        snapshot.keep_all(memory)  # other nodes get their parts from there
        control.send({"say": f"going on from the checkpoint of update {saved.step:,}"})
    else:
        snapshot.keep_all(memory)
        snapshot.write(memory, task.buffer_policy, {})
    base = memory.updates
    board.put("goal", -1 if plan.steps is None else plan.steps)
    board.put("ready", 1)
    if plan.steps is not None and base >= plan.steps:
        board.stop(STOPPING)  # after `ready`: who sees a stop first believes that nothing will begin
    memory.wakeup.ring_all()


def _on(task: Task, device: torch.device) -> Task:
    """The task on the device that was asked for."""
    if device.type == "cpu":
        return task
    if not torch.cuda.is_available():
        raise UsageError(f"device '{device.type}' was asked for, but torch finds no GPU here; leave --device away")
    return task.on(device)


def _work(memory: RunMemory, part: Role, context: RoleContext, control: Control) -> bool:
    """The whole life of a worker, or of all workers of this process; False if it broke off and that has been told."""
    plan, board = memory.plan, memory.board
    task = task_of(plan, context.objects)
    task = _on(task, memory.device(part.index))
    if part.kind == "chief" and not board.get("ready"):
        if task.notice:
            control.send({"notice": task.notice})
        notes = {"parameters": task.parameters()} if isinstance(task, TorchTask) else {}
        control.send({"batch": task.batch, "task": task.name})
        prepare(memory, task, task.start(plan.seed).cpu(), notes, control)
        memory.open()
    else:
        wait_until_ready(memory)
    wait_until_joined(memory)
    mine = ranks(part, plan)
    if len(mine) == 1:
        _live(WorkerSession(memory, task, part.index, hooks_of(plan, context.objects, part.kind), control), task)
        return True
    turn = worker_threads.turn()

    def play(rank: int) -> None:
        torch.set_num_threads(plan.threads)
        wakeup = Wakeup(board, context.wakeup, rank)
        wakeup.spin = 0  # whoever looks on keeps the others of this process from computing
        own = RunMemory(plan, scheme_of(plan, context.objects), board, wakeup, context.state, context.node)
        own.open()
        objects = context.objects | {
            "hooks": copy.deepcopy(context.objects.get("hooks", []))
        }  # each worker has its own
        hooks = hooks_of(plan, objects, "worker" if rank else "chief")
        _live(WorkerSession(own, task, rank, hooks, control, turn), task)

    return worker_threads.hosted(mine, play, lambda rank, error: _report(part, context, control, error, rank))


def _live(session: WorkerSession, task: Task) -> None:
    try:
        train(session, task)
    except BaseException as error:
        session.failed(error)
        raise
    else:
        session.finish()
    finally:
        session.log.close()


def train(session: WorkerSession, task: Task) -> None:
    """Compute the gradients that the session asks for, until it asks for no more."""
    rank = session.rank
    buffers = session.cells.live or None
    room, supply = GradientBuffers(session), BatchSupply(session, task)
    request = session.begin()
    session.waiting.meanwhile = supply.prepare
    with torch.no_grad():
        while request is not None:
            with session.turn:
                batch = supply.next()
                if batch is None:
                    session.view.say(f"worker:{rank} leaves: its data have run out")
                    session.view.leave("its data have run out")
                    return
                batch = session.fed(batch)
                out = room.free()
                try:
                    loss, g = task.grad(request.x, batch, out, buffers)
                except Exception as error:
                    error.add_note(f"in the gradient of worker:{rank}, step {session.worker.t}")
                    raise
            del out
            request = session.give(loss, g, batch.size)
            del g


class BatchSupply:
    """A worker's mini-batches. While it would wait for others, it makes the next one ready."""

    def __init__(self, session: WorkerSession, task: Task) -> None:
        self._session, self._task = session, task
        self._batches: Iterator[Batch] = iter(())
        self._returns = -1
        self._ready: list[Batch | None] = []

    def next(self) -> Batch | None:
        """The next one; None when the data have run out."""
        if self._returns != self._session.membership.returns:  # at first, and after a return to a checkpoint
            self._ready.clear()
            self._returns = self._session.membership.returns
            plan, rank = self._session.memory.plan, self._session.rank
            first = self._session.board.gradients[rank]
            self._batches = self._task.batches(rank, plan.workers, plan.seed, first=first)
        return self._ready.pop() if self._ready else next(self._batches, None)

    def prepare(self) -> None:
        if not self._ready and self._returns == self._session.membership.returns:
            with self._session.turn:
                self._ready.append(next(self._batches, None))


class GradientBuffers:
    """Where gradients are written: in shared memory, so that a push is a signal and no copy."""

    def __init__(self, session: WorkerSession) -> None:
        self._like = session.worker.state.x
        shared = session.cells.device.type == "cpu"
        self._places = [session.memory.tensor(f"grad.{session.rank}.{k}") for k in range(2)] if shared else []
        self._returned = session.returned
        # what a place is held by when no step holds it
        self._idle = sys.getrefcount(self._places[0]) if self._places else 0

    def free(self) -> torch.Tensor:
        """One that no step holds any more; a step may keep a gradient as long as it likes."""
        for k in range(len(self._places)):  # over numbers: a name for a place would hold it
            # the first again and again, if it is free: it is still in the core's cache
            if sys.getrefcount(self._places[k]) <= self._idle and self._returned(self._places[k]):
                return self._places[k]
        return torch.empty_like(self._like)


def error_of(told: dict[str, Any]) -> PacelineError:
    """What a role reported, as an error again."""
    kind = getattr(errors, told["kind"], RunError)
    text = told["text"] if told["text"].startswith(told["where"]) else f"{told['where']}: {told['text']}"
    if kind is errors.UnknownName:  # whose text is made already
        kind = UsageError
    error: PacelineError = kind(text) if issubclass(kind, PacelineError) else RunError(text)
    for note in told["notes"]:
        error.add_note(note)
    return error
