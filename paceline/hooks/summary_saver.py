"""Draw the run in TensorBoard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import UsageError
from paceline.fields import Count, Rate
from paceline.hook import Role, Session
from paceline.hooks._options import Checked
from paceline.hooks._periodic import Periodic
from paceline.hooks._speed import Speed
from paceline.hooks._tensorboard import add_counts, writer


@dataclass
class SummarySaver(Checked):
    """Writes loss, speed and staleness for TensorBoard, into `summaries` of the run directory.

    Every `every` updates (100 if nothing is said) or `seconds`. Real runs have it by default, once a second. The loss
    is that of the chief's last mini-batch; metrics on test data come from the hook `validation`.
    """

    every: Count | None = None
    seconds: Rate | None = None
    roles: ClassVar[frozenset[Role]] = frozenset({"chief"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self._only_one("every", "seconds")

    def begin(self, session: Session) -> None:
        if session.directory is None:
            raise UsageError(
                f"{self.name}: this run has no directory for summaries; the simulator writes no files, "
                "so use paceline train, or the hook log here"
            )
        self._pace = Periodic(self.every or 100, self.seconds, session.updates, session.seconds)
        self._speed = Speed(session)
        self._writer = writer(session.directory / "summaries")

    def after_step(self, session: Session) -> None:
        step = session.updates
        if not self._pace.due(step, session.seconds):
            return
        staleness = session.staleness
        values = {"loss": session.worker.loss, "staleness_mean": staleness.mean, **self._speed.measure(session)}
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step=step)
        add_counts(self._writer, "staleness", staleness.histogram, step)

    def end(self, session: Session) -> None:
        self._writer.close()
