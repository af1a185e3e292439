"""When something is due that happens again and again."""

from __future__ import annotations


class Periodic:
    """Due whenever a count (of steps or updates) has reached the next multiple of `every`, or `seconds` have passed.

    Counts may jump: other workers move the global step as well. `count` and `now` are where the run stands at first,
    so that one that goes on from a checkpoint keeps to the same multiples.
    """

    def __init__(self, every: int | None, seconds: float | None, count: int, now: float) -> None:
        self._every, self._seconds = every, seconds
        self._last = now
        self._next = self._multiple_above(count)

    def due(self, count: int, now: float) -> bool:
        """Whether it is time; if so, the next time is counted from here."""
        if self._seconds is not None:
            if now - self._last < self._seconds:
                return False
            self._last = now
            return True
        if count < self._next:
            return False
        self._next = self._multiple_above(count)
        return True

    def _multiple_above(self, count: int) -> int:
        every = self._every or 1
        return count - count % every + every
