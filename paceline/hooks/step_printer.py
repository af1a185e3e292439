"""Print the steps of every worker."""

from dataclasses import dataclass
from typing import ClassVar

from paceline.fields import Count
from paceline.hook import Role, Session
from paceline.hooks._periodic import Periodic


@dataclass
class StepPrinter(Periodic):
    """Every worker prints its step, the global step and its loss, every `every` steps of its own."""

    every: Count = 1
    roles: ClassVar[frozenset[Role]] = frozenset({"chief", "worker"})
    of_steps: ClassVar[bool] = True

    def act(self, session: Session) -> None:
        worker = session.worker
        session.say(
            f"worker:{worker.rank} local step {worker.t}  global step {session.updates}  loss {worker.loss:.4g}"
        )
