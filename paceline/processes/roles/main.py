"""The one program of every role: chief, worker, server, evaluator. A launcher starts it with all that it needs."""

from __future__ import annotations

import copy
import ctypes
import os
import platform
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.config import build
from paceline.config.endpoint import ALONE, Endpoint
from paceline.config.from_plan import scheme_of, task_of
from paceline.config.plan import Plan
from paceline.errors import UsageError
from paceline.hook import Hook
from paceline.hooks.checkpoint_saver import CheckpointSaver
from paceline.hooks.summary_saver import SummarySaver
from paceline.hooks.validation import Validation
from paceline.inside.kind import Inside, processes_of
from paceline.inside.sliced_task import SlicedTask
from paceline.processes.inside.inner_group import InnerGroup, LedTask
from paceline.processes.memory import cores
from paceline.processes.memory.board import FAILED, Board
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.memory.spinning import Spinning
from paceline.processes.memory.wakeup import Wakeup
from paceline.processes.roles import evaluator, script_role, spare_cores
from paceline.processes.roles.caretaker import Caretaker
from paceline.processes.roles.control_channel import Control, report_of, text_of
from paceline.processes.roles.preparation import prepare, wait_until_joined, wait_until_ready
from paceline.processes.roles.roles import Role, place, ranks
from paceline.processes.roles.server import Server
from paceline.processes.roles.train_loop import run_to_end
from paceline.processes.roles.worker_session import WorkerSession
from paceline.task import Task

_SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SERVER_SLICE = 100_000  # ns, the shortest that the kernel takes: a process with a short slice runs first
_ATTRIBUTES = struct.Struct(
    "IIQiIQQQ"
)  # struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period
INTERRUPT_DELAY = 2.0  # seconds within which a launcher writes down that a signal has asked it to end the run


@dataclass
class RoleContext:
    """What a launcher hands to a role."""

    plan: Plan
    board: Board
    wakeup: list[int]  # the descriptors of all wakeup pipes
    state: int  # the descriptor of the memory for the state
    objects: dict[str, Any] = field(default_factory=dict)  # task, scheme, hooks that have no name
    node: Endpoint = ALONE
    letters: tuple[int, int] | None = None  # where the descriptors of GPU memory are

    def memory(self, number: int, *, spins: bool = True) -> RunMemory:
        """The run's memory, for the process or worker whose wakeup pipe has this number. `spins`: it may spin where it
        waits."""
        spinning = Spinning.for_processes(cores.available(), self._busy(number)) if spins else None
        wakeup = Wakeup(self.board, self.wakeup, number, spinning)
        scheme = scheme_of(self.plan, self.objects)
        return RunMemory(self.plan, scheme, self.board, wakeup, self.state, self.node, self.letters)

    def _busy(self, number: int) -> int:
        """How many cores are busy on this node if this process spins: the workers compute, in all their threads. Where
        one of them may spin, it does so instead of computing; a server does so beside them."""
        plan, board, here = self.plan, self.board, self.node.number
        workers = sum(board.node[rank] == here for rank in range(plan.hosts))
        servers = sum(board.server_node[shard] == here for shard in range(board.servers))
        return workers * plan.worker_threads + (servers if number >= board.workers else 0)


def hooks_of(plan: Plan, objects: dict[str, Any], kind: str) -> list[Hook]:
    """The hooks of a role, including the default ones."""
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


def main(role: Role, context: RoleContext, control: Control) -> int:
    """Run a role to its end; gives the exit code."""
    plan, board = context.plan, context.board
    torch.set_num_threads(plan.threads)
    if context.node.secret is None:  # elsewhere engines signal every process, and SIGTERM stays ignored
        signal.signal(signal.SIGTERM, lambda *_: _terminated(board))
    try:
        memory = context.memory(place(role, plan))
        serving = 0 if memory.locked_calls() else board.servers  # processes beside the workers that compute
        computing = plan.hosts * processes_of(plan.inside)  # processes of workers
        crowded = len(os.sched_getaffinity(0)) < computing + serving
        if crowded:
            _schedule(serves=role.kind == "server")
        if role.kind == "server":
            wait_until_ready(memory)
            if memory.on_gpu:
                torch.cuda.set_device(memory.device(0))
            if memory.locked_calls():
                Caretaker(memory).run()
            elif memory.scheme.methods:
                spare_cores.use(spare_cores.share(memory, serves=True))
                Server(memory, role.index).run()
        elif role.kind == "evaluator":
            wait_until_ready(memory)
            device = memory.device(plan.hosts, plan.eval_device or "cpu")  # the GPU after the workers'
            evaluator.follow(memory, _on(task_of(plan, context.objects), device), device, control)
        elif plan.script:
            own = list(context.objects.get("hooks", ()))
            script_role.play(
                memory, role.index, lambda given: hooks_of(plan, {"hooks": own + given}, role.kind), control
            )
        else:
            with ExitStack() as inside:
                if not _work(memory, role, context, control, inside):
                    return 1
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return 0
        _report(role, context, control, error, role.index)
        return 1
    return 0


def _schedule(*, serves: bool) -> None:
    """There are fewer cores than roles. A server works for a moment and sleeps: it asks for a short time slice, so that
    the kernel runs it soon and it keeps the core although it has just woken a worker. A worker computes: when it is
    woken, it does not preempt the process that runs. Neither needs a privilege; an old kernel ignores it."""
    number = _SYS_SCHED_SETATTR.get(platform.machine())
    if not serves:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    elif number is not None:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, _SERVER_SLICE, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)


def _terminated(board: Board) -> None:
    """This process has received SIGTERM. If all processes have, the launcher ends the run in order. If only this one
    has, it dies, and the launcher restarts it. A second signal kills it at once."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def decide() -> None:
        if not board.get("interrupted"):
            os.kill(os.getpid(), signal.SIGTERM)

    timer = threading.Timer(INTERRUPT_DELAY, decide)
    timer.daemon = True
    timer.start()


def _report(role: Role, context: RoleContext, control: Control, error: BaseException, rank: int) -> None:
    """Tell the launcher of an error, and stop the run."""
    traceback.print_exc()
    sys.stderr.flush()
    board = context.board
    if role.kind == "evaluator" and not isinstance(error, UsageError):  # training does not need it
        control.send({"failure": text_of(error)})
        return
    control.send({"error": report_of(role, error, board.t[rank] if role.trains else None)})
    board.stop(FAILED)
    Wakeup(board, context.wakeup, place(role, context.plan)).ring_all()


def _on(task: Task, device: torch.device) -> Task:
    """The task on the device that was asked for."""
    if device.type == "cpu":
        return task
    if not torch.cuda.is_available():
        raise UsageError(f"device '{device.type}' was asked for, but torch finds no GPU here; omit --device")
    torch.cuda.set_device(device)
    return task.on(device)


def _work(memory: RunMemory, role: Role, context: RoleContext, control: Control, inside: ExitStack) -> bool:
    """Run the workers of this process to their end; False if one failed and that has been reported. `inside` ends the
    other processes of its worker."""
    plan, board = memory.plan, memory.board
    group = _inner_group(role, context, control)
    if group is not None:
        inside.callback(group.close)
    task = _on(task_of(plan, context.objects), memory.device(role.index))
    if group is not None:
        assert isinstance(task, SlicedTask)
        task = LedTask(task, group)
    if role.kind == "chief" and not board.get("ready"):
        if task.notice:
            control.send({"notice": task.notice})
        notes = {"parameters": named} if (named := task.parameters()) else {}
        control.send({"batch": task.batch, "epoch_size": task.epoch_size, "task": task.name})
        prepare(memory, task, notes, control)
    else:
        wait_until_ready(memory)
    wait_until_joined(memory)
    spare_cores.use(spare_cores.share(memory, serves=False))
    mine = ranks(role, plan)
    if len(mine) == 1:
        hooks = hooks_of(plan, context.objects, role.kind)
        run_to_end(WorkerSession(memory, task, role.index, hooks, control), task)
        return True
    # Held by a worker while it draws a batch, computes a gradient or evaluates: the process has one model and one state
    # of torch's random numbers. No worker waits for another process while it holds the lock.
    turn = threading.RLock()

    def play(rank: int) -> None:
        torch.set_num_threads(plan.threads)
        own = context.memory(rank, spins=False)  # a thread that spins keeps the others of this process from computing
        own.open()
        copies = {"hooks": copy.deepcopy(context.objects.get("hooks", []))}  # each worker has its own
        hooks = hooks_of(plan, context.objects | copies, "worker" if rank else "chief")
        run_to_end(WorkerSession(own, task, rank, hooks, control, turn), task)

    return hosted(mine, play, lambda rank, error: _report(role, context, control, error, rank))


def _inner_group(role: Role, context: RoleContext, control: Control) -> InnerGroup | None:
    """The other processes of this worker; before this process makes its task, which may start threads."""
    plan = context.plan
    inside = Inside.read(plan.inside)
    if inside is None:
        return None

    def make() -> SlicedTask:
        torch.set_num_threads(plan.threads)
        task = task_of(plan, context.objects)
        assert isinstance(task, SlicedTask)
        return task

    def say(text: str) -> None:
        control.send({"warn": text})

    return InnerGroup(inside, str(role), make, say, control.close)


def hosted(ranks: Sequence[int], play: Callable[[int], None], failed: Callable[[int, BaseException], None]) -> bool:
    """Run every rank to its end, each in a thread. An error of one is given to `failed` at once, which stops the
    others; False if there was an error."""
    broken: list[int] = []

    def one(rank: int) -> None:
        try:
            play(rank)
        except BaseException as error:
            broken.append(rank)
            failed(rank, error)

    threads = [threading.Thread(target=one, args=(rank,), name=f"worker:{rank}") for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return not broken
