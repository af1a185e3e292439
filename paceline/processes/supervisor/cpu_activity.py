"""Whether a process works: the CPU time of it and of its children, as the kernel counts it.

A process that computes, however long, uses CPU time. One that hangs (in a lock that is never released, at a barrier of
threads that a fork has not copied) uses none.
"""

from __future__ import annotations

import os
from pathlib import Path

IDLE = 0.02  # a smaller share of one core is that of timers, not of work
TICK = 1.0 / os.sysconf("SC_CLK_TCK")


class Activity:
    """Remembers for each process when it last did something."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, float]] = {}  # pid -> CPU seconds when it last did something, and when

    def idle_for(self, pid: int, now: float) -> float:
        """Seconds for which a process has used no CPU time, since the first call for it."""
        used, in_kernel = _used(pid)
        before, since = self._seen.get(pid, (used, now))
        if in_kernel or used - before > IDLE * (now - since) + 2 * TICK:
            before, since = used, now
        self._seen[pid] = before, since
        return now - since

    def forget(self, pid: int) -> None:
        """Count again from the next call: the process waits for others, or it has ended."""
        self._seen.pop(pid, None)


def _used(pid: int) -> tuple[float, bool]:
    """CPU seconds of a process and its children; whether one of them is inside the kernel, reading a disk perhaps."""
    try:
        state, fields = _stat(pid)
    except (OSError, ValueError, IndexError):  # it has ended
        return 0.0, False
    used, in_kernel = sum(map(int, fields)) * TICK, state == "D"
    for child in _children(pid):
        theirs, inside = _used(child)
        used, in_kernel = used + theirs, in_kernel or inside
    return used, in_kernel


def _stat(pid: int) -> tuple[str, list[str]]:
    """The state, and the CPU time: its own and that of children that have ended, in user mode and in the kernel."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return text[0], text[11:15]


def _children(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    except (OSError, ValueError):
        return []


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process."""
    try:
        return _stat(pid)[0] == "T"
    except (OSError, IndexError):
        return False
