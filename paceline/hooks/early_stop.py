"""Stop when a metric no longer improves."""

from dataclasses import dataclass

from paceline.fields import Count, Rate
from paceline.hook import Session
from paceline.hooks._metric import gain, metric_of
from paceline.hooks._periodic import Periodic


@dataclass
class EarlyStop(Periodic):
    """Ends the run when a metric has not improved by more than `margin` in `patience` evaluations in a row.

    The chief evaluates every `every` updates. `accuracy` improves when it rises, all others when they fall.
    """

    metric: str = "loss"
    margin: Rate = 0.0
    patience: Count = 5
    every: Count = 50

    def begin(self, session: Session) -> None:
        super().begin(session)
        self._best: float | None = None
        self._in_vain = 0

    def act(self, session: Session) -> None:
        value = metric_of(self.name, session.evaluate(), self.metric)
        if self._best is None or gain(self.metric, value, self._best) > self.margin:
            self._best, self._in_vain = value, 0
            return
        self._in_vain += 1
        if self._in_vain >= self.patience:
            session.stop(f"{self.metric} is no better than {self._best:.4g} in {self.patience} evaluations")
