"""Write summaries for TensorBoard."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.hook import Rest, Session
from paceline.hooks._metric import Gauges
from paceline.hooks._periodic import EveryOrSeconds
from paceline.runs.event_file import EventFile


@dataclass
class SummarySaver(EveryOrSeconds):
    """Writes loss, learning rate, gradient norm, speed, staleness and bytes sent for TensorBoard.

    The files are in `summaries` of the run directory. It writes every `every` updates (100 if neither is given) or
    `seconds`. Real runs have it by default, once a second. Loss and gradient are those of a mini-batch of the chief;
    `bytes_sent` and `bytes_received` are of all workers, since the run was started or resumed. Metrics on test data
    come from the hook `validation`.
    """

    def begin(self, session: Session) -> None:
        if session.directory is None:
            raise UsageError(
                f"{self.name}: this run has no directory for summaries; the simulator writes no files, "
                "so use paceline train, or the hook log here"
            )
        super().begin(session)
        self._gauges = Gauges(session)
        self._folder = session.directory / "summaries"
        self._file: EventFile | None = None  # made for the first summary

    def before_step(self, session: Session) -> None:
        if self._timer.near(self.count(session), session.seconds):
            self._gauges.prepare(session)

    def rests(self, session: Session) -> Rest | None:
        rest = self._timer.rest()
        return rest if rest.updates == math.inf else None  # by updates: `near` sees every step

    def act(self, session: Session) -> None:
        step, staleness = session.updates, session.staleness
        if self._file is None:
            self._file = EventFile(self._folder)
        self._file.scalars(self._gauges.measure(session, staleness), step)
        self._file.counts("staleness", staleness.histogram, step)
