"""Change the learning rate during the run."""

import math
from dataclasses import dataclass
from typing import Literal

from paceline.errors import UsageError
from paceline.fields import Count, Natural, Rate
from paceline.hook import Session
from paceline.hooks._options import Checked


@dataclass
class LearningRate(Checked):
    """Sets the learning rate as a function of the global step, from `base` on.

    After `warmup` updates, in which it grows evenly up to `base`, n further updates give

        constant      base
        step          base * gamma ^ floor(n / over)
        exponential   base * gamma ^ (n / over)
        linear        evenly from base down to `lowest` in `over` updates
        cosine        the same along half a cosine

    `key` is the hyper-parameter that is set: lr, server.lr or rule.lr. It changes at most every `every` updates.
    """

    base: Rate | None = None
    kind: Literal["constant", "step", "exponential", "linear", "cosine"] = "constant"
    over: Count | None = None
    gamma: Rate = 0.1
    lowest: Rate = 0.0
    warmup: Natural = 0
    key: str = "lr"
    every: Count = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base is None:
            raise UsageError(f"{self.name}: give base=RATE, the learning rate to begin with")
        if self.kind != "constant" and self.over is None:
            raise UsageError(f"{self.name}: kind={self.kind} needs over=UPDATES, the updates that its change takes")

    def begin(self, session: Session) -> None:
        self._value: float | None = None
        self._since = 0
        self._apply(session)  # before the first push of any worker

    def before_step(self, session: Session) -> None:
        self._apply(session)

    def rate(self, updates: int) -> float:
        """The learning rate at a global step."""
        assert self.base is not None
        if updates < self.warmup:
            return self.base * (updates + 1) / self.warmup
        passed = (updates - self.warmup) / (self.over or 1)
        rest = max(0.0, 1 - passed)
        match self.kind:
            case "step":
                return self.base * self.gamma ** math.floor(passed)
            case "exponential":
                return float(self.base * self.gamma**passed)
            case "linear":
                return self.lowest + (self.base - self.lowest) * rest
            case "cosine":
                return self.lowest + (self.base - self.lowest) * (1 - math.cos(math.pi * rest)) / 2
        return self.base

    def _apply(self, session: Session) -> None:
        updates = session.updates
        # updates may be fewer than before: the run may have returned to a checkpoint
        if self._value is not None and self._since <= updates < self._since + self.every:
            return
        value = self.rate(updates)
        if self._value is None or not math.isclose(value, self._value, rel_tol=1e-12):
            session.set(**{self.key: value})
            self._value, self._since = value, updates
