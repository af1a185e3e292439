"""The status of a run, read from the board by its launcher."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from paceline.processes.memory.board import DONE, ENDING, STARTING, TRAINING, WAITING
from paceline.processes.roles.roles import ranks
from paceline.processes.supervisor.children import Child
from paceline.processes.supervisor.status import RoleState, RoleStatus, Status

if TYPE_CHECKING:
    from paceline.processes.supervisor.supervisor import Supervisor

STATES = {  # the words on the board
    STARTING: RoleState.STARTING,
    TRAINING: RoleState.TRAINING,
    WAITING: RoleState.WAITING,
    ENDING: RoleState.ENDING,
    DONE: RoleState.DONE,
}
SPAN = 2.0  # seconds over which a speed is measured
_NOTHING = math.nan


class Watcher:
    """Reads the board; remembers earlier values to compute speeds."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, list[int], int]] = []

    def status(self, launcher: Supervisor) -> Status:
        board, plan = launcher.board, launcher.plan
        now = time.monotonic()
        samples = board.samples.tolist()
        self._seen = [one for one in self._seen if now - one[0] <= SPAN][-200:] or self._seen[-1:]
        updates = launcher.updates()
        then, before, fewer = self._seen[0] if self._seen else (now, samples, updates)
        self._seen.append((now, samples, updates))
        span = now - then
        speeds = [max(a - b, 0) / span if span else 0.0 for a, b in zip(samples, before, strict=True)]
        staleness = launcher.memory.staleness().mean if launcher.opened() else _NOTHING
        return Status(
            title=plan.title,
            roles=tuple(self._role(launcher, child, speeds, staleness) for child in launcher.children),
            updates=updates,
            goal=plan.steps,
            seconds=now - board.get("began") / 1e9,
            samples_per_second=sum(speeds),
            metrics=launcher.metrics,
            updates_per_second=max(updates - fewer, 0) / span if span else 0.0,
            seconds_left=self._clock_left(launcher, now),
            checkpoint=board.get("checkpoint"),
            checkpoint_age=max(now - board.get("written") / 1e9, 0.0) if board.get("written") else _NOTHING,
        )

    def _clock_left(self, launcher: Supervisor, now: float) -> float:
        """Until `--seconds` of training have passed: they begin with the first gradient of this launch."""
        limit, first = launcher.plan.seconds, launcher.board.get("first_step")
        if limit is None:
            return _NOTHING
        return max(0.0, limit - (now - first / 1e9)) if first else limit

    def _role(self, launcher: Supervisor, child: Child, speeds: list[float], staleness: float) -> RoleStatus:
        board, part = launcher.board, child.part
        if part.kind == "server":
            state = STATES[board.server_state[part.index]]
            if state in (RoleState.TRAINING, RoleState.WAITING):
                state = RoleState.TRAINING if board.get("ready") else RoleState.WAITING
            step, speed, loss = int(board.performed[part.index]), _NOTHING, _NOTHING
        elif part.kind == "evaluator":
            state = STATES[board.evaluator_words[0]]
            if state == RoleState.WAITING:
                state = RoleState.FOLLOWING
            step, speed, loss, staleness = board.evaluator_words[1] - 1, _NOTHING, _NOTHING, _NOTHING
        else:
            mine = ranks(part, launcher.plan)
            states = {board.state[rank] for rank in mine}
            state = STATES[TRAINING if TRAINING in states else min(states)]
            step, speed = max(board.t[rank] for rank in mine), sum(speeds[rank] for rank in mine)
            losses = [board.loss[rank] for rank in mine if board.gradients[rank]]
            loss = sum(losses) / len(losses) if losses else _NOTHING
            staleness = _NOTHING
        if child.done:
            state = RoleState.DONE if launcher.outcome.error is None else RoleState.GONE
        elif child.restarts and state == RoleState.STARTING:
            state = RoleState.RESTARTING
        pid = child.pid or self._pid(launcher, child)
        return RoleStatus(str(part), state, pid, step, speed, loss, staleness, child.restarts)

    def _pid(self, launcher: Supervisor, child: Child) -> int:
        """The pid of a process on another node, as its agent has written it on the board."""
        board, part = launcher.board, child.part
        if part.kind == "server":
            return int(board.server_pid[part.index])
        return int(board.evaluator_words[2] if part.kind == "evaluator" else board.pid[part.index])
