"""Whether the next gradient will be sent as it is: then it can travel while the rest of it is computed."""

from __future__ import annotations

from paceline.state import Vector

ENOUGH = 3  # gradients in a row that were sent as they were, before the next is expected to be
PAUSE = 100  # gradients without a forecast, after one that did not come true; then twice as many
LONGEST = 1 << 20


class GradientForecast:
    """A step does the same with its gradient each time, as a rule: this counts how often it has."""

    def __init__(self) -> None:
        self._gradient: tuple[int, int, int] | None = None  # the last one: its memory, length and count of writes
        self._row = 0  # gradients in a row that were sent as they were; below 0: a pause
        self._pause = PAUSE

    @property
    def expected(self) -> bool:
        return self._row >= ENOUGH

    def computed(self, g: Vector) -> None:
        """A gradient is there."""
        if self._gradient is not None:  # the last one was not sent
            self.restart()
        self._gradient = g.data_ptr(), g.numel(), g._version

    def sent(self, v: Vector) -> None:
        """A vector is sent: the last gradient as it was, or something else in its stead."""
        gradient, self._gradient = self._gradient, None
        if gradient == (v.data_ptr(), v.numel(), v._version):
            self._row += 1
        elif gradient is not None:
            self.restart()

    def restart(self) -> None:
        self._row = min(self._row, 0)

    def missed(self) -> None:
        """What was sent early was not what the step sent."""
        self._row = -self._pause
        self._pause = min(2 * self._pause, LONGEST)
