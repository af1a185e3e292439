"""Say how it goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import UnknownName
from paceline.fields import Count, Rate
from paceline.hook import Role, Session
from paceline.hooks._options import Checked
from paceline.hooks._periodic import Periodic

_SHOWN: dict[str, Callable[[Session], str]] = {
    "update": lambda session: f"update {session.updates}",
    "seconds": lambda session: f"{session.seconds:.4g} s",
    "loss": lambda session: f"loss {session.worker.loss:.4g}",
    "samples": lambda session: f"samples {session.samples}",
    "staleness": lambda session: f"staleness {session.staleness.mean:.4g}",
}


@dataclass
class Log(Checked):
    """Prints named values of the chief every `every` steps (100 if nothing is said) or every `seconds`.

    `values` are some of update, seconds, loss, samples (of all workers) and staleness (the mean so far).
    """

    every: Count | None = None
    seconds: Rate | None = None
    values: tuple[str, ...] = ("update", "seconds", "loss")
    roles: ClassVar[frozenset[Role]] = frozenset({"chief"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self._only_one("every", "seconds")
        for name in self.values:
            if name not in _SHOWN:
                raise UnknownName(f"value of {self.name}", name, _SHOWN)

    def begin(self, session: Session) -> None:
        self._pace = Periodic(self.every or 100, self.seconds, session.worker.t, session.seconds)

    def after_step(self, session: Session) -> None:
        worker = session.worker
        if self._pace.due(worker.t, session.seconds):
            values = (_SHOWN[name](session) for name in self.values)
            session.say("  ".join((f"worker:{worker.rank} step {worker.t}", *values)))
