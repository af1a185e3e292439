"""Stop when it gets no better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.fields import Count, Rate
from paceline.hook import Role, Session
from paceline.hooks._metric import gain, metric_of
from paceline.hooks._options import Checked
from paceline.hooks._periodic import Periodic


@dataclass
class EarlyStop(Checked):
    """Ends the run when a metric has not improved by more than `margin` in `patience` evaluations in a row.

    The chief evaluates every `every` updates. `accuracy` improves when it rises, all others when they fall.
    """

    metric: str = "loss"
    margin: Rate = 0.0
    patience: Count = 5
    every: Count = 50
    roles: ClassVar[frozenset[Role]] = frozenset({"chief"})

    def begin(self, session: Session) -> None:
        self._pace = Periodic(self.every, None, session.updates, session.seconds)
        self._best: float | None = None
        self._in_vain = 0

    def after_step(self, session: Session) -> None:
        if not self._pace.due(session.updates, session.seconds):
            return
        value = metric_of(self.name, session.evaluate(), self.metric)
        if self._best is None or gain(self.metric, value, self._best) > self.margin:
            self._best, self._in_vain = value, 0
            return
        self._in_vain += 1
        if self._in_vain >= self.patience:
            session.stop(f"{self.metric} is no better than {self._best:.4g} in {self.patience} evaluations")
