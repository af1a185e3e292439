"""Before the first step: the chief lays out and fills shared memory; the other processes wait for it."""

from __future__ import annotations

from typing import Any

from paceline.processes.memory import snapshot
from paceline.processes.memory.board import STOP, STOPPING
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.roles.control_channel import Control
from paceline.runs import checkpoint
from paceline.runs.run_directory import RunDirectory
from paceline.task import Task


def prepare(memory: RunMemory, task: Task, notes: dict[str, Any], control: Control) -> None:
    """Lay out the run's memory, fill it from the start or the newest checkpoint, and open it. Only for the chief."""
    plan, board, x0 = memory.plan, memory.board, task.start(memory.plan.seed).cpu()
    for text in memory.scheme.warnings(plan.workers, task.curvature() if plan.curvature is None else plan.curvature):
        control.send({"warn": text})
    for text in task.warnings(plan.workers):
        control.send({"warn": text})
    memory.lay_out(x0, task.buffers(), notes)
    if memory.no_sharing is not None:
        what = "the memory of the GPUs cannot be shared between processes here"
        control.send({"warn": f"{what} ({memory.no_sharing}): the state is copied to the host after every step"})
    if not _resumed(memory, control):
        snapshot.write_first(memory, task.buffer_policy)
        if memory.node.secret is not None:
            snapshot.keep_all(memory)  # other nodes get their parts from there
    finished = plan.steps is not None and memory.updates >= plan.steps
    board.put("goal", -1 if plan.steps is None else plan.steps)
    board.put("ready", 1)
    if finished:
        board.stop(STOPPING)  # after `ready`: a process that sees a stop before it never starts
    memory.wakeup.ring_all()
    memory.open()


def _resumed(memory: RunMemory, control: Control) -> bool:
    """Restore the newest checkpoint, if there is one."""
    plan, board = memory.plan, memory.board
    directory = RunDirectory.open(plan.directory).checkpoints
    saved = checkpoint.resumed_from(directory, lambda text: control.send({"warn": text}))
    if saved is None:
        return False
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
    board.put("written", memory.now())  # as if written now: no training has passed it yet
    snapshot.keep_all(memory)  # other nodes get their parts from there
    control.send({"say": f"resuming from the checkpoint of update {saved.step:,}"})
    return True


def wait_until_ready(memory: RunMemory) -> None:
    """Wait until the chief has filled shared memory, however long its data take, and open it."""
    board = memory.board
    memory.wakeup.wait(lambda: bool(board.get("ready") or board.run[STOP]))
    if not board.get("ready"):
        raise SystemExit(0)
    memory.open()


def wait_until_joined(memory: RunMemory) -> None:
    """No worker begins a step before all workers and servers are there, under every scheme."""
    board = memory.board
    memory.wakeup.wait(lambda: bool(board.get("joined") or board.run[STOP]))
