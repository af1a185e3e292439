"""Say how it goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.hook import Hook, Role, Session
from paceline.scheme import Count


@dataclass
class Log(Hook):
    """Prints step, updates, time and loss of the chief every `every` steps."""

    every: Count = 100
    roles: ClassVar[frozenset[Role]] = frozenset({"chief"})

    def after_step(self, session: Session) -> None:
        worker = session.worker
        if worker.t % self.every == 0:
            session.say(
                f"worker:{worker.rank} step {worker.t}  update {session.updates}  {session.seconds:.4g} s  "
                f"loss {worker.loss:.4g}"
            )
