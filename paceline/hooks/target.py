"""Stop when it is good enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.fields import Count
from paceline.hook import Role, Session
from paceline.hooks._metric import gain, metric_of
from paceline.hooks._options import Checked
from paceline.hooks._periodic import Periodic


@dataclass
class Target(Checked):
    """Ends the run once a metric has reached a value: how long a scheme takes to get there is its real price.

    The chief evaluates every `every` updates. `accuracy` counts as reached from below, all others from above.
    """

    metric: str = "accuracy"
    value: float = 0.95
    every: Count = 50
    roles: ClassVar[frozenset[Role]] = frozenset({"chief"})

    def begin(self, session: Session) -> None:
        self._pace = Periodic(self.every, None, session.updates, session.seconds)

    def after_step(self, session: Session) -> None:
        if not self._pace.due(session.updates, session.seconds):
            return
        reached = metric_of(self.name, session.evaluate(), self.metric)
        if gain(self.metric, reached, self.value) >= 0:
            session.stop(f"{self.metric} {reached:.4g} reached the target {self.value:g}")
