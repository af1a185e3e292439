"""Print the metrics at the end."""

from dataclasses import dataclass
from typing import ClassVar

from paceline.hook import Hook, Role, Session
from paceline.hooks._metric import shown


@dataclass
class FinalMetrics(Hook):
    """Prints the metrics when the run ends, also when it ends with an error."""

    roles: ClassVar[frozenset[Role]] = frozenset({"chief"})

    def end(self, session: Session) -> None:
        metrics = shown(session.evaluate())
        session.say(f"at the end: update {session.updates}  {session.seconds:.4g} s  {metrics}")
