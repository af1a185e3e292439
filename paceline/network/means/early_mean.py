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
from paceline.runtime.gradient_forecast import GradientForecast
from paceline.state import Vector

if TYPE_CHECKING:
    from paceline.network.means.group_formation import PendingMean


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
        same = same and isinstance(meeting.op, Mean) and meeting.op.weight == self._weight
        return same and unchanged and meeting.circle is self.circle


class MeanForecast:
    """Whether the next gradient will go to a mean of all workers as it is, and with which weight."""

    def __init__(self) -> None:
        self._gradients = GradientForecast()
        self._weight = 1.0
        self.computed, self.missed = self._gradients.computed, self._gradients.missed

    def weight(self) -> float | None:
        """The weight of the next gradient in its mean; None if no mean is expected."""
        return self._weight if self._gradients.expected else None

    def mean(self, op: Mean) -> None:
        if op.weight != self._weight or op.among is not None:
            self._gradients.restart()
            self._weight = op.weight
        self._gradients.sent(op.v)
