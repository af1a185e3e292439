"""Stop when a metric has reached its target."""

from dataclasses import dataclass

from paceline.fields import Count
from paceline.hook import Session
from paceline.hooks._metric import gain, metric_of
from paceline.hooks._periodic import Periodic


@dataclass
class Target(Periodic):
    """Ends the run once a metric has reached a value: how long a scheme takes to get there is its real price.

    The chief evaluates every `every` updates. `accuracy` counts as reached from below, all others from above.
    """

    metric: str = "accuracy"
    value: float = 0.95
    every: Count = 50

    def act(self, session: Session) -> None:
        reached = metric_of(self.name, session.evaluate(), self.metric)
        if gain(self.metric, reached, self.value) >= 0:
            session.stop(f"{self.metric} {reached:.4g} reached the target {self.value:g}")
