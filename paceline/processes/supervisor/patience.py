"""How long a supervisor waits for its processes at their start and at the end of the run.

During training, processes that wait for each other time out by themselves. But before the first gradient all wait for a
process that hangs, and at the end the supervisor itself waits for all processes.

A process that computes, however long, uses CPU time. One that hangs (in a lock that is never released, at a barrier of
threads that a fork has not copied) uses none: the CPU time of it and of its children is what the kernel counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from paceline.config.plan import Plan
from paceline.processes.memory.board import STARTING, TRAINING, Board
from paceline.processes.roles.roles import places, ranks
from paceline.processes.supervisor.children import Child, progress_of

IDLE = 0.02  # a smaller share of one core is that of timers, not of work
TICK = 1.0 / os.sysconf("SC_CLK_TCK")


class Patience:
    """Finds the processes that have made no progress for `seconds`."""

    def __init__(self, plan: Plan, board: Board) -> None:
        self._plan, self._board = plan, board
        self._activity, self._preparing = Activity(), Activity()
        self._motion: tuple[int, ...] = ()
        self._moved = 0.0

    def stopped(self, children: Iterable[Child], now: float) -> Iterator[tuple[Child, float]]:
        """The processes that a signal (SIGSTOP) has stopped, and for how many seconds."""
        for child in children:
            if is_stopped(child.pid):
                child.stopped_at = child.stopped_at or now
                yield child, now - child.stopped_at
            else:
                child.stopped_at = 0.0

    def stuck_at_start(self, children: Iterable[Child], now: float, seconds: float) -> list[Child]:
        """Processes that hang before their first gradient (a server: before its first call)."""
        stuck = []
        for child in children:
            if child.done or not child.pid or child.part.kind == "evaluator":
                continue
            if self._asleep(child) or progress_of(child.part, self._plan, self._board) != child.progress_at_start:
                self._activity.forget(child.pid)
            elif self._activity.idle_for(child.pid, now) > seconds:
                self._activity.forget(child.pid)
                stuck.append(child)
        return stuck

    def preparing(self, children: Iterable[Child], now: float) -> bool:
        """Whether a server that starts, or returns to a checkpoint, does something: the workers wait for it, and on
        another node they cannot see that it does."""
        working = False
        for child in children:
            if child.part.kind == "server" and child.pid:
                if self._board.server_state[child.part.index] != STARTING or self._asleep(child):
                    self._preparing.forget(child.pid)
                else:
                    working |= self._preparing.idle_for(child.pid, now) < self._plan.patience / 4
        return working

    def stuck_at_end(
        self, children: Sequence[Child], now: float, seconds: float, exempt: Iterable[Child]
    ) -> list[Child]:
        """Processes that the end of the run waits for, once none has made progress for `seconds`. `exempt` have no
        time limit."""
        board, exempted = self._board, {id(child) for child in exempt}
        awaited = [child for child in children if not child.done and id(child) not in exempted]
        counts = (board.gradients, board.t, board.performed, board.gone, board.state, board.saved)
        words = (board.get(name) for name in ("over", "checkpoint", "alarm", "generation"))
        motion = (*map(sum, counts), *words, sum(not child.done for child in children))
        if motion != self._motion or any(self._computes_elsewhere(child) for child in awaited):
            self._motion, self._moved = motion, now
        for child in awaited:
            if child.pid and self._asleep(child):
                self._activity.forget(child.pid)
            elif child.pid:
                self._moved = max(self._moved, now - self._activity.idle_for(child.pid, now))
        if now - self._moved <= seconds:
            return []
        self._moved = now
        return awaited

    def hanging(self, children: Iterable[Child]) -> list[Child]:
        """Of these processes, those that do not wait for another one: the others wait for them."""
        return [child for child in children if child.pid and not self._asleep(child)]

    def _asleep(self, child: Child) -> bool:
        """Whether it waits to be woken by another process."""
        return any(self._board.sleeping[place] for place in places(child.part, self._plan))

    def _computes_elsewhere(self, child: Child) -> bool:
        """Whether it trains on another node, where its CPU time is not seen from here."""
        return not child.pid and any(self._board.state[rank] == TRAINING for rank in ranks(child.part, self._plan))


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
