"""The progress of a run: read from the board, and written to `status.json`; a warning when the checkpoint is old."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from paceline.config.plan import Plan
from paceline.fields import finite
from paceline.hook import Hook
from paceline.hooks.checkpoint_saver import CheckpointSaver
from paceline.processes.memory.board import COMPILING, DONE, ENDING, EVALUATING, STARTING, TRAINING, WAITING
from paceline.processes.roles import evaluator
from paceline.processes.roles.roles import ranks
from paceline.processes.supervisor.children import Child
from paceline.processes.supervisor.status import RoleState, RoleStatus, Status, UpdateRate, duration, time_left
from paceline.processes.supervisor.waits import Waits
from paceline.runs import atomic_files
from paceline.runs.run_directory import STATUS, RunDirectory

if TYPE_CHECKING:
    from paceline.processes.supervisor.supervisor import Supervisor

SPAN = 2.0  # seconds over which a speed is measured
EVERY = 2.0  # seconds between two writings
STATES = {  # the words on the board
    STARTING: RoleState.STARTING,
    TRAINING: RoleState.TRAINING,
    WAITING: RoleState.WAITING,
    ENDING: RoleState.ENDING,
    DONE: RoleState.DONE,
}
EVALUATOR_STATES = {RoleState.WAITING: RoleState.FOLLOWING, RoleState.TRAINING: RoleState.EVALUATING}
WORK = {EVALUATING: RoleState.EVALUATING, COMPILING: RoleState.COMPILING}


class Watcher:
    """Reads the board; remembers earlier values to compute speeds."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, list[int], int]] = []
        self._waits = Waits()
        self._waiting: dict[int, str] = {}  # the workers that wait for long, and for what

    def status(self, launcher: Supervisor) -> Status:
        board, plan = launcher.board, launcher.plan
        now = time.monotonic()
        samples = board.samples.tolist()
        self._seen = [one for one in self._seen if now - one[0] <= SPAN][-200:] or self._seen[-1:]
        updates = launcher.launched.updates()
        then, before, fewer = self._seen[0] if self._seen else (now, samples, updates)
        self._seen.append((now, samples, updates))
        span = now - then
        speeds = [max(a - b, 0) / span if span else 0.0 for a, b in zip(samples, before, strict=True)]
        staleness = math.nan
        if launcher.launched.opened():
            staleness = launcher.launched.memory.staleness().mean
            self._waiting = self._waits.at(now, launcher.launched.memory)
        left, first = math.nan, board.get("first_step")
        if plan.seconds is not None:  # of training: they begin with the first gradient of this launch
            left = max(0.0, plan.seconds - (now - first / 1e9)) if first else plan.seconds
        return Status(
            title=plan.title,
            roles=tuple(self._role(launcher, child, speeds, staleness) for child in launcher.children),
            updates=updates,
            goal=plan.steps,
            seconds=now - board.get("began") / 1e9,
            samples_per_second=sum(speeds),
            metrics=launcher.metrics,
            samples=sum(samples),
            epochs=sum(samples) / size if (size := launcher.outcome.epoch_size) else math.nan,
            updates_per_second=max(updates - fewer, 0) / span if span else 0.0,
            seconds_left=left,
            checkpoint=board.get("checkpoint"),
            checkpoint_age=max(now - board.get("written") / 1e9, 0.0) if board.get("written") else math.nan,
        )

    def _role(self, launcher: Supervisor, child: Child, speeds: list[float], staleness: float) -> RoleStatus:
        board, part, speed, loss, waits_for = launcher.board, child.part, math.nan, math.nan, ""
        words = board.evaluator_words
        if part.kind == "server":
            state = STATES[board.server_state[part.index]]
            if state in (RoleState.TRAINING, RoleState.WAITING):
                state = RoleState.TRAINING if board.get("ready") else RoleState.WAITING
            step, pid = board.performed[part.index], board.server_pid[part.index]
        elif part.kind == "evaluator":
            state = STATES[words[evaluator.STATE]]
            state = EVALUATOR_STATES.get(state, state)
            step, pid, staleness = words[evaluator.STEP] - 1, words[evaluator.PID], math.nan
        else:
            mine = ranks(part, launcher.plan)
            states = {board.state[rank] for rank in mine}
            state = STATES[TRAINING if TRAINING in states else min(states)]
            state = WORK.get(max(board.work[rank] for rank in mine), state)
            if launcher.plan.script and board.gone[part.index]:
                state = RoleState.AFTER
            step, pid = max(board.t[rank] for rank in mine), board.pid[part.index]
            speed, staleness = sum(speeds[rank] for rank in mine), math.nan
            losses = [board.loss[rank] for rank in mine if board.gradients[rank]]
            loss = sum(losses) / len(losses) if losses else math.nan
            if state in (RoleState.TRAINING, RoleState.WAITING) and all(rank in self._waiting for rank in mine):
                state, waits_for = RoleState.WAITING, self._waiting[mine[0]]
        if child.done:
            state = RoleState.DONE if launcher.outcome.error is None else RoleState.GONE
            waits_for = ""
        elif child.restarts and state == RoleState.STARTING:
            state = RoleState.RESTARTING
        return RoleStatus(str(part), state, pid, step, speed, loss, staleness, child.restarts, waits_for)


class Progress:
    """Writes `status.json`. A failure to write does not end the run."""

    def __init__(self, directory: RunDirectory, plan: Plan, hooks: Iterable[Hook], warn: Callable[[str], None]) -> None:
        self._path, self._patience, self._warn = directory.path / STATUS, plan.patience, warn
        saver = next((hook for hook in hooks if isinstance(hook, CheckpointSaver)), None)
        self._steps = saver.every if saver is not None else None
        self._seconds = saver.seconds or 60.0 if saver is not None and not saver.every else None
        self._pace = UpdateRate()
        self._written = -math.inf
        self._warned = 0.0  # the age at the last warning

    def note(self, status: Status) -> None:
        now = time.monotonic()
        self._pace.note(now, status.updates)
        self._watch_checkpoint(status)
        if now - self._written < EVERY:
            return
        self._written = now
        told = asdict(status) | {"at": time.time(), "seconds_left": time_left(status, self._pace, now)}
        with contextlib.suppress(OSError):  # such as a full disk, which the next checkpoint reports
            content = json.dumps(finite(told), allow_nan=False).encode()
            atomic_files.write_bytes(self._path, content, durable=False)

    def end(self) -> None:
        """The run has a result from now on."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _watch_checkpoint(self, status: Status) -> None:
        """Warn when one is overdue by two patiences, and again each time that its age has doubled."""
        age, behind = status.checkpoint_age, status.updates - status.checkpoint
        if math.isnan(age) or behind <= 0 or not (self._steps or self._seconds):
            return
        if age < self._warned / 2:  # there is a newer one
            self._warned = 0.0
        late = age > 2 * self._patience + (self._seconds or 0.0) and behind > 2 * (self._steps or 0)
        if late and age >= 2 * self._warned:
            self._warned = age
            often = f"{self._steps:,} updates" if self._steps else f"{self._seconds:g} s"
            self._warn(
                f"the newest checkpoint, of update {status.checkpoint:,}, is {duration(age, '.0f')} old, although one "
                f"is due every {often}; {behind:,} updates would be lost with a server"
            )
