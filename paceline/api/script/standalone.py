"""A script that runs by itself: one process is the worker, the server, the chief and the launcher."""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from paceline import signals
from paceline.api.execute import last_result
from paceline.config import build
from paceline.config.endpoint import ALONE
from paceline.config.plan import Plan
from paceline.errors import UsageError
from paceline.hook import Hook
from paceline.processes.calls.in_process import InProcess
from paceline.processes.memory.board import RUNNING, STOP, STOPPING
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.memory.wakeup import Wakeup
from paceline.processes.roles.control_channel import Control
from paceline.processes.roles.preparation import prepare
from paceline.processes.roles.worker_session import WorkerSession
from paceline.processes.supervisor import profile_summary
from paceline.processes.supervisor.launch_memory import LaunchMemory
from paceline.processes.supervisor.outcome import Outcome, result_of
from paceline.processes.supervisor.run_summaries import RunSummaries
from paceline.runs import checkpoint, fingerprint
from paceline.runs.accounts import Totals
from paceline.runs.checkpoint import Checkpoint
from paceline.runs.run_directory import RunDirectory
from paceline.scheme import Scheme
from paceline.task import Task


class Records(Control):
    """Keeps the messages that would go to a launcher, here and in the run directory."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory, self.outcome = directory, Outcome()

    def send(self, message: dict[str, Any]) -> None:
        for kind, content in message.items():  # what `say` says, the session has printed
            self.outcome.note(kind, content)
            if kind == "warn":
                _warn(content)
            elif kind == "record":
                self.directory.append_history(content)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


def directory_for(name: str, path: str | Path | None, resume: bool) -> RunDirectory:
    """The directory of the run: a new one, or the one to resume."""
    if not resume:
        return RunDirectory.create(path, name)
    if path is None:
        raise UsageError("attach(resume=True) needs the run to resume: attach(directory='runs/NAME')")
    return RunDirectory.open(path)


def session_of(
    plan: Plan, scheme: Scheme, task: Task, hooks: Sequence[Hook], notes: dict[str, Any], around: ExitStack
) -> WorkerSession:
    """The session of the only worker, and what a launcher would set up. `around` undoes it and writes the result."""
    directory = RunDirectory.open(plan.directory)
    around.enter_context(directory.lock())
    before = directory.history(_warn)
    last = last_result(directory)
    directory.begin()
    directory.write_plan(dataclasses.asdict(plan))
    first = checkpoint.newest(directory.checkpoints, lambda _: None)
    totals = Totals.of(last, first)
    launched = fingerprint.of(plan, scheme, None, None, hooks)
    fingerprint.write(directory.path, launched, first.step if first else 0, _warn)
    if plan.profile:
        profile_summary.clear(directory.path)
    made = LaunchMemory(plan, scheme, {}, ALONE)
    around.callback(made.close)
    memory = RunMemory(plan, scheme, made.board, Wakeup(made.board, made.pipes, 0), made.state, letters=made.letters)
    memory.board.put("restarts", totals.restarts)
    memory.board.put("rolled_back", totals.rolled_back)
    control = Records(directory)
    around.enter_context(_recorded(memory, control, before, first))
    control.send({"task": task.name})
    prepare(memory, task, notes, control)
    around.enter_context(_interruptible(memory, control.outcome))
    calls = InProcess(memory) if scheme.methods else None
    return WorkerSession(memory, task, 0, hooks, control, calls=calls)


@contextmanager
def _recorded(
    memory: RunMemory, control: Records, before: list[dict[str, Any]], first: Checkpoint | None
) -> Iterator[None]:
    """Write the result of the run at the end. `before`: earlier history; `first`: the checkpoint it resumed from."""
    error: BaseException | None = None
    summaries = RunSummaries(memory.plan, "")
    try:
        yield
    except BaseException as caught:
        error = caught
        raise
    finally:
        board, outcome = memory.board, control.outcome
        names = ("began", "first_step", "stopped", "rolled_back", "restarts")
        outcome.words = {name: board.get(name) for name in names}
        outcome.words["stopped"] = outcome.words["stopped"] or memory.now()
        reached = memory.furthest if board.get("ready") else 0
        outcome.words |= {"samples": sum(board.samples), "reached": reached}
        outcome.profile = profile_summary.collected(memory.plan, board)
        profile_summary.write(control.directory.path, outcome.profile)
        result = result_of(memory.plan, memory.first_scheme, outcome, before, first)
        told = {} if result is None else result.as_dict()
        failed = {} if error is None or outcome.result else {"error": f"{type(error).__name__}: {error}"}
        if memory.plan.summaries:
            summaries.end(build.hyper_of(memory.first_scheme), result, failed.get("error", ""))
        control.directory.write_result(told | failed)


@contextmanager
def _interruptible(memory: RunMemory, outcome: Outcome) -> Iterator[None]:
    """Ctrl-C ends the run in order, with a last checkpoint; a second one ends it at once."""
    board = memory.board

    def heard(*_: object) -> None:
        if outcome.interrupted:
            raise KeyboardInterrupt
        outcome.interrupted = True
        if board.run[STOP] == RUNNING:
            print("interrupted: ending in order, with a last checkpoint (again to end at once)", file=sys.stderr)
            outcome.stopped = "interrupted"
            board.stop(STOPPING)  # without waking others: that takes a lock, which the interrupted code may hold

    with signals.handling({signal.SIGINT: heard}):
        yield
    if outcome.interrupted:
        raise KeyboardInterrupt
