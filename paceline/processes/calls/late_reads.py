"""Copies of x that a worker makes for itself after it has released the server's lock.

The copy of a vector takes as long as the rest of a call. While one worker copies x, the next one may have the lock, and
does all of its call that does not need x. A word on the board says who copies; who uses x under the lock waits until no
process does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from torch import Tensor

from paceline.processes.memory.board import Board, fence

LOOKS, PAUSE = 2000, 0.0002  # at the words of other processes without a pause; seconds of a pause


class LateReads:
    """The copies of one process, and its waits for those of the others."""

    def __init__(self, board: Board, place: int, check: Callable[[int], None]) -> None:
        """`check` raises if the run has failed, or has returned to a checkpoint since a generation."""
        self._words, self._place, self._check = board.reading, place, check
        self._none = bytes(self._words.nbytes)
        self._copies: list[tuple[Tensor, Tensor]] = []  # from, to

    def begin(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        """Under the lock: these copies are made after it."""
        if copies:
            self._words[self._place] = 1
            self._copies = copies

    def perform(self) -> None:
        """Make the copies."""
        if self._copies:
            for source, target in self._copies:
                target.copy_(source)
            self._copies = []
            fence()
            self._words[self._place] = 0

    def before_use(self, generation: int) -> None:
        """Wait until no process copies."""
        looks = 0
        while self._words.tobytes() != self._none:
            looks += 1
            if looks < LOOKS:
                os.sched_yield()
            else:
                time.sleep(PAUSE)
            self._check(generation)
