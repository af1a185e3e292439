"""The wakeup pipes of roles that are not on this node."""

from __future__ import annotations

import contextlib
import os
import selectors
from collections.abc import Iterator

from paceline.processes.memory.board import Board
from paceline.processes.memory.wakeup import Wakeup


class RemoteWakeups:
    """Reads the pipes of roles on other nodes: a process that wakes such a role wakes this one instead, which sends the
    news to the other nodes."""

    def __init__(self, selector: selectors.BaseSelector, board: Board, pipes: list[int]) -> None:
        self._selector, self._board, self._pipes = selector, board, pipes
        self._places: set[int] = set()

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._places))

    def set(self, place: int, remote: bool) -> None:
        """Whether the role of a pipe is on another node."""
        if remote and place not in self._places:
            self._places.add(place)
            self._selector.register(self._pipes[2 * place], selectors.EVENT_READ)
        elif not remote and place in self._places:
            self._places.discard(place)
            self._selector.unregister(self._pipes[2 * place])
        self._board.sleeping[place] = int(remote)

    def drain(self) -> None:
        for place in self._places:
            with contextlib.suppress(BlockingIOError):
                os.read(self._pipes[2 * place], 4096)

    def ring_local(self, wakeup: Wakeup) -> None:
        """Wake every role of this node."""
        for place in range(self._board.roles):
            if place not in self._places:
                wakeup.ring(place)
