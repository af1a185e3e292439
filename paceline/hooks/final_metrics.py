"""Say how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.hook import Hook, Role, Session


@dataclass
class FinalMetrics(Hook):
    """Prints the metrics when the run ends, also when it ends with an error."""

    roles: ClassVar[frozenset[Role]] = frozenset({"chief"})

    def end(self, session: Session) -> None:
        shown = "  ".join(f"{name} {value:.4g}" for name, value in session.evaluate().items())
        session.say(f"at the end: update {session.updates}  {session.seconds:.4g} s  {shown}")
