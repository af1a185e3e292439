"""The timeline of a run as plain data: what each role did, from when to when, and what happened at one moment.

    gradient    computes a gradient; `detail` says if it was "unfinished" at the end, "stopped" or "lost" by a death
    call        messages of a call to the server, or performing it; `detail` is the method
    mean        messages of a mean, or computing it;   meeting: the same of a meeting
    wait        for other roles: a guard is false, or members of a mean or a meeting have not arrived
    sleep, checkpoint, dead                            return: waits for the return of the run to a checkpoint

The kinds `data`, `hooks`, `update` and `other` are of real runs only: in virtual time they take none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MOST = 200_000  # intervals and instants of a timeline: a trace of about 25 MB
COMPUTING = ("gradient", "data", "hooks", "update", "other")
KINDS = ("gradient", "wait", "call", "mean", "meeting", "sleep", "checkpoint", "return", "dead", *COMPUTING[1:])
RUN = "run"  # the role of what happens to the run as a whole


class Interval(NamedTuple):
    """What a role did for a while. `by`: the role that ended a wait; `background`: beside what the role waited for;
    `cause`: the moment at which the other role did what ended a wait, if that is known and not the wait's end."""

    role: str
    kind: str
    start: float
    end: float
    detail: str = ""
    by: str = ""
    background: bool = False
    cause: float | None = None


class Instant(NamedTuple):
    """What happened at one moment: update, kill, restart, return, checkpoint, or a fault (stop, delay, partition)."""

    role: str
    kind: str
    at: float
    detail: str = ""


@dataclass
class Timeline:
    """The intervals and instants of a run, in seconds since its start. Those of one role that are not in the background
    do not overlap, and are in their order.

    What begins after `until`, or after the moment at which there are `most` entries, is not recorded: `left_out` counts
    it, and `end` is the moment until which the timeline is complete.
    """

    until: float = math.inf
    most: int = MOST
    virtual: bool = True
    about: dict[str, Any] = field(default_factory=dict)  # scheme, task, workers, …
    intervals: list[Interval] = field(default_factory=list)
    instants: list[Instant] = field(default_factory=list)
    end: float = 0.0
    left_out: int = 0
    notes: list[str] = field(default_factory=list)  # what is missing, and why

    def add(self, interval: Interval) -> None:
        """Record an interval, up to `until`. They come in the order of their ends."""
        if interval.start >= self.until:
            self.left_out += 1
            return
        cut = interval if interval.end <= self.until else interval._replace(end=self.until)
        self.intervals.append(cut)
        self._limit(cut.end)

    def mark(self, role: str, kind: str, at: float, detail: str = "") -> None:
        """Record an instant."""
        if at > self.until:
            self.left_out += 1
            return
        self.instants.append(Instant(role, kind, at, detail))
        self._limit(at)

    def _limit(self, at: float) -> None:
        """If it is full: all that begins later is left out, what is under way now is cut."""
        if len(self.intervals) + len(self.instants) >= self.most:
            self.until = min(self.until, at)

    def finish(self, end: float) -> None:
        """The run has ended."""
        self.end = min(end, self.until)
        self.intervals.sort(key=lambda one: (one.start, one.end, _place(one.role)))
        self.instants.sort(key=lambda one: one.at)

    @property
    def roles(self) -> list[str]:
        """All roles, workers first, by their numbers."""
        found = {one.role for one in self.intervals} | {one.role for one in self.instants}
        return sorted(found - {RUN}, key=_place)

    def count(self, kind: str) -> int:
        """The complete intervals of a kind (gradients that were neither stopped nor lost), or the instants."""
        whole = sum(one.kind == kind and not (kind == "gradient" and one.detail) for one in self.intervals)
        return whole + sum(one.kind == kind for one in self.instants)

    def shares(self) -> dict[str, dict[str, float]]:
        """Of each role, the part of the time until `end` that each kind has taken, in the foreground. They add up to
        at most 1: a role that has not begun, or has ended, does nothing."""
        return {role: shares_of((one for one in self.intervals if one.role == role), self.end) for role in self.roles}


def shares_of(intervals: Iterable[Interval], end: float) -> dict[str, float]:
    """The part of the time until `end` that each kind has taken, in the foreground."""
    taken = dict.fromkeys(KINDS, 0.0)
    for one in intervals:
        if not one.background:
            taken[one.kind] += one.end - one.start
    return {kind: seconds / end for kind, seconds in taken.items() if seconds and end}


def _place(role: str) -> tuple[bool, str, int]:
    name, _, number = role.partition(":")
    return name != "worker", name, int(number or 0)
