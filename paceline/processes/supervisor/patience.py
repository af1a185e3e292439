"""How long a supervisor waits for its processes at their start and at the end of the run.

During training, processes that wait for each other time out by themselves. But before the first gradient all wait for a
process that hangs, and at the end the supervisor itself waits for all processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.config.plan import Plan
from paceline.processes.memory.board import TRAINING, Board
from paceline.processes.roles.roles import places, ranks
from paceline.processes.supervisor.children import Child, progress_of
from paceline.processes.supervisor.cpu_activity import Activity


class Patience:
    """Finds the processes that have made no progress for `seconds`."""

    def __init__(self, plan: Plan, board: Board) -> None:
        self._plan, self._board = plan, board
        self._activity = Activity()
        self._motion: tuple[int, ...] = ()
        self._moved = 0.0

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
