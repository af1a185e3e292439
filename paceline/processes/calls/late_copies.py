"""Rows that a call under the server's lock writes with `s.write`: they are copied after the lock is released.

The process that made the call copies them, and a word on the board says so meanwhile. Who uses a cell of several rows
waits until no process has such a word. A death before the copies are complete is a death inside the call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from paceline.processes.memory.board import Board, fence

SMALL = 1 << 14  # bytes: a smaller row is copied at once
LOOKS, PAUSE = 2000, 0.0002  # at the words of other processes without a pause; seconds of a pause


class LateCopies:
    """The copies of one process, and its waits for those of the others."""

    def __init__(self, board: Board, place: int, check: Callable[[int], None]) -> None:
        """`check` raises if the run has failed, or has returned to a checkpoint since a generation."""
        self._words, self._place, self._check = board.copying, place, check
        self._none = bytes(self._words.nbytes)
        self._args: tuple[Any, ...] = ()  # of the call that is performed, if its rows may be copied after it
        self._rows: list[tuple[Tensor, Tensor]] = []

    def begin(self, args: tuple[Any, ...]) -> None:
        """A call of this process with these arguments is performed now."""
        self._args = args

    def end(self) -> None:
        self._args = ()

    def write(self, row: Tensor, value: Tensor) -> bool:
        """Copy a row later, if it is an argument of the call: those do not change. Else it is not taken."""
        if value.nbytes < SMALL or not any(value is arg for arg in self._args):
            return False
        self._words[self._place] = 1
        self._rows.append((row, value))
        return True

    def perform(self) -> None:
        """Copy what this process has still to copy."""
        if self._rows:
            for row, value in self._rows:
                row.copy_(value)
            self._rows.clear()
            fence()
            self._words[self._place] = 0

    def before_use(self, generation: int) -> None:
        """Wait until every row of earlier calls is copied. The method that is performed may keep what it reads now: the
        rows that it writes after this are copied at once."""
        self._args = ()
        self.perform()
        looks = 0
        while self._words.tobytes() != self._none:
            looks += 1
            time.sleep(0 if looks < LOOKS else PAUSE)
            self._check(generation)  # last: a process that has died has its word taken back after the generation rose
