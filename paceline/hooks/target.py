"""Stop when it is good enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import UsageError
from paceline.hook import Hook, Role, Session
from paceline.scheme import Count


@dataclass
class Target(Hook):
    """Ends the run once a metric has reached a value: how long a scheme takes to get there is its real price.

    The chief evaluates every `every` updates. `accuracy` counts as reached from below, all others from above.
    """

    metric: str = "accuracy"
    value: float = 0.95
    every: Count = 50
    roles: ClassVar[frozenset[Role]] = frozenset({"chief"})

    def begin(self, session: Session) -> None:
        self._due = self.every

    def after_step(self, session: Session) -> None:
        if session.updates < self._due:
            return
        self._due = session.updates - session.updates % self.every + self.every
        metrics = session.evaluate()
        if self.metric not in metrics:
            raise UsageError(f"target: the task has no metric {self.metric!r}; it has {', '.join(metrics)}")
        reached = metrics[self.metric]
        if reached >= self.value if self.metric == "accuracy" else reached <= self.value:
            session.stop(f"{self.metric} {reached:.4g} reached the target {self.value:g}")
