"""Say every step of everybody."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.fields import Count
from paceline.hook import Session
from paceline.hooks._options import Checked
from paceline.hooks._periodic import Periodic


@dataclass
class StepPrinter(Checked):
    """Every worker prints its step, the global step and its loss, every `every` steps of its own."""

    every: Count = 1

    def begin(self, session: Session) -> None:
        self._pace = Periodic(self.every, None, session.worker.t, session.seconds)

    def after_step(self, session: Session) -> None:
        worker = session.worker
        if self._pace.due(worker.t, session.seconds):
            session.say(
                f"worker:{worker.rank} local step {worker.t}  global step {session.updates}  loss {worker.loss:.4g}"
            )
