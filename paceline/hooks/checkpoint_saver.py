"""Save the run on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.fields import Count, Rate
from paceline.hook import Role, Session
from paceline.hooks._options import Checked
from paceline.hooks._periodic import Periodic


@dataclass
class CheckpointSaver(Checked):
    """Asks for a checkpoint of the whole run every `every` updates or every `seconds` (60 if nothing is said)."""

    every: Count | None = None
    seconds: Rate | None = None
    roles: ClassVar[frozenset[Role]] = frozenset({"chief"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self._only_one("every", "seconds")

    def begin(self, session: Session) -> None:
        seconds = 60.0 if self.every is None and self.seconds is None else self.seconds
        self._pace = Periodic(self.every, seconds, session.updates, session.seconds)

    def after_step(self, session: Session) -> None:
        if self._pace.due(session.updates, session.seconds):
            session.save()
