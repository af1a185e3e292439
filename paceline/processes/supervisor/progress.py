"""The progress of a run: read from the board, and written to `status.json`; a warning when the checkpoint is old."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paceline.config.plan import Plan
from paceline.fields import finite
from paceline.hook import Hook
from paceline.hooks.checkpoint_saver import CheckpointSaver
from paceline.processes.memory.board import (
    COMPILING,
    DONE,
    ENDING,
    EVALUATING,
    RUNNING,
    STARTING,
    STOP,
    TRAINING,
    WAITING,
)
from paceline.processes.roles import evaluator
from paceline.processes.roles.roles import ranks
from paceline.processes.supervisor.children import Child
from paceline.processes.supervisor.status import LETTERS, RoleState, RoleStatus, Status, UpdateRate, duration, time_left
from paceline.processes.supervisor.waits import Waits
from paceline.runs import atomic_files
from paceline.runs.progress_log import ProgressLog
from paceline.runs.run_directory import STATUS, RunDirectory

if TYPE_CHECKING:
    from paceline.processes.supervisor.supervisor import Supervisor

SPAN = 2.0  # seconds over which a speed is measured
EVERY = 2.0  # seconds between two writings
MOST_AGES = 65  # numbers of a status that tell the staleness
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
        staleness, ages = math.nan, tuple[int, ...]()
        if launcher.launched.opened():
            found = launcher.launched.memory.staleness()
            staleness, ages = found.mean, _ages(found.histogram)
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
            stopping=_stopping(launcher),
            ages=ages,
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
        node = 0
        if part.kind != "evaluator":
            node = int(board.server_node[part.index] if part.kind == "server" else board.node[part.index])
        return RoleStatus(str(part), state, pid, step, speed, loss, staleness, child.restarts, waits_for, node)


def _ages(histogram: Mapping[int, int]) -> tuple[int, ...]:
    """A histogram of staleness as a row of counts."""
    row = [0] * min(max(histogram, default=-1) + 1, MOST_AGES)
    for age, count in histogram.items():
        row[min(age, len(row) - 1)] += count
    return tuple(row)


def _stopping(launcher: Supervisor) -> str:
    outcome = launcher.outcome
    if outcome.error is not None:
        return str(outcome.error)
    if outcome.stopped:
        return outcome.stopped
    if launcher.asked.count:
        return "interrupted"
    return "" if launcher.board.run[STOP] == RUNNING else "the goal is reached"


class Progress:
    """Writes `status.json` and `progress.jsonl`. A failure to write does not end the run."""

    def __init__(
        self,
        directory: RunDirectory,
        plan: Plan,
        hooks: Iterable[Hook],
        warn: Callable[[str], None],
        log: ProgressLog,
    ) -> None:
        self._path, self._patience, self._warn, self._log = directory.path / STATUS, plan.patience, warn, log
        self._last: Status | None = None
        saver = next((hook for hook in hooks if isinstance(hook, CheckpointSaver)), None)
        self._steps = saver.every if saver is not None else None
        self._seconds = saver.seconds or 60.0 if saver is not None and not saver.every else None
        self._pace = UpdateRate()
        self._written, self._ending = -math.inf, False
        self._warned = 0.0  # the age at the last warning

    def note(self, status: Status) -> None:
        now = time.monotonic()
        self._pace.note(now, status.updates)
        self._watch_checkpoint(status)
        self._record(status)
        ending = bool(status.stopping) and not self._ending
        if now - self._written < EVERY and not ending:  # that it ends is told at once: nobody else is to ask for it
            return
        self._written, self._ending = now, bool(status.stopping)
        told = asdict(status) | {"at": time.time(), "seconds_left": time_left(status, self._pace, now)}
        with contextlib.suppress(OSError):  # such as a full disk, which the next checkpoint reports
            content = json.dumps(finite(told), allow_nan=False).encode()
            atomic_files.write_bytes(self._path, content, durable=False)

    def _record(self, status: Status) -> None:
        """Add lines to the log: what has happened since the last status, and how the run stands."""
        before, self._last = self._last, status
        if before is not None:
            states = {role.name: role.state for role in before.roles}
            for now in status.roles:
                was = states.get(now.name)
                if was == RoleState.RESTARTING and now.state not in (RoleState.RESTARTING, RoleState.GONE):
                    self._log.event("restarted", f"{now.name} is back, as process {now.pid}", now.name)
            if status.updates < before.updates:
                self._log.event("rolled back", f"from update {before.updates:,} to update {status.updates:,}")
            if status.stopping and not before.stopping:
                self._log.event("stop", status.stopping)
        if self._log.due() or before is None:
            self._log.note(_line(status), [role.name for role in status.roles])

    def end(self) -> None:
        """The run has a result from now on."""
        if self._last is not None:
            final = _line(self._last) | {"roles": [asdict(role) for role in self._last.roles]}
            self._log.note(final, [role.name for role in self._last.roles])
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


def _line(status: Status) -> dict[str, Any]:
    """A status as a line of the log."""
    losses = [role.loss for role in status.roles if not math.isnan(role.loss)]
    stale = [role.staleness for role in status.roles if not math.isnan(role.staleness)]
    return {
        "updates": status.updates,
        "samples": status.samples,
        "samples_per_second": round(status.samples_per_second, 1),
        "loss": sum(losses) / len(losses) if losses else None,
        "staleness": round(stale[0], 3) if stale else None,
        "checkpoint": status.checkpoint,
        "states": "".join(LETTERS[role.state] for role in status.roles),
    }
