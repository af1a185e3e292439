"""How a run stands at one moment, as the launcher tells it to people and to `status.json`."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from enum import StrEnum


class RoleState(StrEnum):
    """What a role does now."""

    STARTING = "starting"
    TRAINING = "training"
    WAITING = "waiting"
    COMPILING = "compiling"  # torch.compile
    EVALUATING = "evaluating"
    AFTER = "after loop"  # a script that goes on after its training
    FOLLOWING = "following"  # an evaluator that waits for the next checkpoint
    ENDING = "ending"
    RESTARTING = "restarting"
    DONE = "done"
    GONE = "gone"  # its process has ended, and the run has failed


# each state in the rows of `progress.jsonl`
LETTERS = dict(zip(RoleState, "stwcvafer.x", strict=True))


@dataclass(frozen=True)
class RoleStatus:
    """One process. NaN (for step: a negative number, for pid: 0) where a number means nothing for the role."""

    name: str  # chief, worker:1, server:0, evaluator
    state: RoleState
    pid: int
    step: int
    samples_per_second: float
    loss: float
    staleness: float
    restarts: int
    waits_for: str = ""  # what it has been waiting for, if for long: "worker 1 at a mean"
    node: int = 0  # the node of its process; 0: that of the chief


@dataclass(frozen=True)
class Status:
    """All of a run at one moment; `metrics` are those of the last evaluation."""

    title: str
    roles: tuple[RoleStatus, ...]
    updates: int
    goal: int | None
    seconds: float
    samples_per_second: float
    metrics: dict[str, float]
    samples: int = 0  # of all gradients
    epochs: float = math.nan  # samples / training samples; NaN: they have no length
    updates_per_second: float = math.nan
    seconds_left: float = math.nan  # until the clock ends it (--seconds); NaN: it does not
    checkpoint: int = -1  # the update of the newest one
    checkpoint_age: float = math.nan  # in seconds
    stopping: str = ""  # why the run is ending; empty: it is not
    ages: tuple[int, ...] = ()  # how many gradients were 0, 1, 2, … versions old; the last number: that or older


class UpdateRate:
    """Updates per second of late: what happened minutes ago, or before the first update, does not count."""

    WINDOW = 10.0  # seconds that count,
    FEWEST = 4  # and more where so few updates were seen in them

    def __init__(self) -> None:
        self._updates: int | None = None
        self._rises: deque[tuple[float, int]] = deque()

    def note(self, now: float, updates: int) -> None:
        if self._updates is not None and updates < self._updates:  # rolled back
            self._rises.clear()
        elif self._updates is not None and updates > self._updates:
            self._rises.append((now, updates))
        self._updates = updates
        while len(self._rises) > self.FEWEST and self._rises[0][0] < now - self.WINDOW:
            self._rises.popleft()

    def seconds_to(self, goal: int, now: float) -> float:
        """NaN while unknown: too few updates were seen, or they have stopped."""
        if self._updates is not None and self._updates >= goal:
            return 0.0
        if len(self._rises) < 2:
            return math.nan
        (begin, first), (end, last) = self._rises[0], self._rises[-1]
        quiet, usual_gap = now - end, (end - begin) / (len(self._rises) - 1)
        if end - begin < 1.0 or quiet > max(self.WINDOW, 3 * usual_gap):
            return math.nan
        return max(0.0, (goal - last) * (end - begin) / (last - first) - quiet)


def time_left(status: Status, pace: UpdateRate, now: float) -> float:
    """Seconds until the run ends, by its updates or by the clock, whichever comes first; NaN while unknown."""
    by_updates = math.nan if status.goal is None else pace.seconds_to(status.goal, now)
    known = [one for one in (by_updates, status.seconds_left) if not math.isnan(one)]
    return min(known, default=math.nan)


def duration(seconds: float, form: str) -> str:
    """12.3 s, 2 min 05 s, 1 h 05 min; `form` is for what is less than a minute."""
    if seconds < 60:
        return f"{format(seconds, form)} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {int(seconds % 60):02} s"
    return f"{seconds // 3600:,.0f} h {int(seconds % 3600 // 60):02} min"
