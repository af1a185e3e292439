"""Say how fast it goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.fields import Count, Rate
from paceline.hook import Role, Session
from paceline.hooks._options import Checked
from paceline.hooks._periodic import Periodic
from paceline.hooks._speed import Speed


@dataclass
class StepCounter(Checked):
    """Prints and records updates and samples per second, every `every` updates (100 if nothing is said) or `seconds`.

    Each figure is the mean since the one before.
    """

    every: Count | None = None
    seconds: Rate | None = None
    roles: ClassVar[frozenset[Role]] = frozenset({"chief"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self._only_one("every", "seconds")

    def begin(self, session: Session) -> None:
        self._pace = Periodic(self.every or 100, self.seconds, session.updates, session.seconds)
        self._speed: Speed | None = None

    def before_step(self, session: Session) -> None:
        if self._speed is None:  # what the run needed to get going is not its speed
            self._speed = Speed(session)

    def after_step(self, session: Session) -> None:
        if self._speed is None or not self._pace.due(session.updates, session.seconds):
            return
        rates = self._speed.measure(session)
        if rates:
            session.say(
                f"update {session.updates}: {rates['updates_per_second']:.4g} updates/s, "
                f"{rates['samples_per_second']:.4g} samples/s"
            )
            session.record(rates)
