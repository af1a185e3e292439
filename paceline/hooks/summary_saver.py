"""Write summaries for TensorBoard."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import UsageError
from paceline.hook import Rest, Session
from paceline.hooks._metric import Gauges
from paceline.hooks._periodic import EveryOrSeconds
from paceline.hooks._tensorboard import add_counts, writer

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


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
        self._writer: SummaryWriter | None = None  # made for the first summary: it takes a tenth of a second

    def before_step(self, session: Session) -> None:
        if self._timer.near(self.count(session), session.seconds):
            self._gauges.prepare(session)

    def rests(self, session: Session) -> Rest | None:
        rest = self._timer.rest()
        return rest if rest.updates == math.inf else None  # by updates: `near` sees every step

    def act(self, session: Session) -> None:
        step, staleness = session.updates, session.staleness
        if self._writer is None:
            self._writer = writer(self._folder)
        for name, value in self._gauges.measure(session).items():
            self._writer.add_scalar(name, value, global_step=step)
        add_counts(self._writer, "staleness", staleness.histogram, step)

    def end(self, session: Session) -> None:
        if self._writer is not None:
            self._writer.close()
