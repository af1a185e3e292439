"""A mean that begins while the gradient that it is of is computed, and whether one is worth beginning.

A step that writes `g = await w.grad(x); g = await w.mean(g)` does so each time. After a few gradients that went to a
mean of all workers as they were, the next one is sent as far as it is final, while the rest of it is computed. It is
used only if the mean turns out to be of that vector, not written to since; else the worker leaves the group, which
forms again without what was sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.network.means.group import Group
from paceline.network.means.group_record import MeanGroup
from paceline.ops import Mean
from paceline.state import Vector

if TYPE_CHECKING:
    from paceline.network.means.group_formation import PendingMean

ENOUGH = 3  # gradients in a row that went to a mean, before the next is sent early
PAUSE = 100  # gradients without a forecast, after one that did not come true; then twice as many
LONGEST = 1 << 20  # gradients without, at most, after a forecast that did not come true


class EarlyMean:
    """The vector of the next mean, while it is computed."""

    def __init__(self, circle: MeanGroup, group: Group, v: Vector, weight: float, tell: Callable[[int], None]) -> None:
        self.circle, self.group = circle, group
        self._v, self._weight, self._tell = v, weight, tell
        self._from: int | None = v.numel()  # the index from which on it is final; None: what was said was wrong
        self._version = 0

    def final(self, index: int, version: int) -> None:
        """The vector is final from an index on, at this count of writes to it; -1: something was written after all."""
        if index < 0 or self._from is None:
            self._from = None
            return
        self._from, self._version = index, version
        self._tell(index)

    def becomes(self, meeting: PendingMean) -> bool:
        """Whether a mean is of this vector, as it was sent."""
        v, mine = meeting.v, self._v
        same = v.data_ptr() == mine.data_ptr() and v.shape == mine.shape and v.dtype == mine.dtype
        unchanged = self._from == 0 and v._version == self._version
        return same and unchanged and meeting.op.weight == self._weight and meeting.circle is self.circle


class MeanForecast:
    """Whether the next gradient will go to a mean of all workers as it is."""

    def __init__(self) -> None:
        self._gradient: tuple[int, int, int] | None = None  # the last one: its memory, length and count of writes
        self._row = 0  # gradients in a row that went to a mean; below 0: a pause
        self._pause = PAUSE
        self._weight = 1.0

    def weight(self) -> float | None:
        """The weight of the next gradient in its mean; None if no mean is expected."""
        return self._weight if self._row >= ENOUGH else None

    def computed(self, g: Vector) -> None:
        if self._gradient is not None:  # the last one went to no mean
            self._row = min(self._row, 0)
        self._gradient = g.data_ptr(), g.numel(), g._version

    def mean(self, op: Mean) -> None:
        v, expected = op.v, self._gradient
        self._gradient = None
        if expected == (v.data_ptr(), v.numel(), v._version) and op.among is None:
            if op.weight != self._weight:
                self._row, self._weight = min(self._row, 0), op.weight
            self._row += 1
        elif expected is not None:
            self._row = min(self._row, 0)

    def missed(self) -> None:
        self._row = -self._pause
        self._pause = min(2 * self._pause, LONGEST)
