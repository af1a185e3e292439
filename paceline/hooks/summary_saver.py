"""Write summaries for TensorBoard."""

from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.hook import Session
from paceline.hooks._metric import Speed
from paceline.hooks._periodic import EveryOrSeconds
from paceline.hooks._tensorboard import add_counts, writer


@dataclass
class SummarySaver(EveryOrSeconds):
    """Writes loss, speed and staleness for TensorBoard, into `summaries` of the run directory.

    Every `every` updates (100 if neither is given) or `seconds`. Real runs have it by default, once a second. The loss
    is that of the chief's last mini-batch; metrics on test data come from the hook `validation`.
    """

    def begin(self, session: Session) -> None:
        if session.directory is None:
            raise UsageError(
                f"{self.name}: this run has no directory for summaries; the simulator writes no files, "
                "so use paceline train, or the hook log here"
            )
        super().begin(session)
        self._speed = Speed(session)
        self._writer = writer(session.directory / "summaries")

    def act(self, session: Session) -> None:
        step, staleness = session.updates, session.staleness
        values = {"loss": session.worker.loss, "staleness_mean": staleness.mean, **self._speed.measure(session)}
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step=step)
        add_counts(self._writer, "staleness", staleness.histogram, step)

    def end(self, session: Session) -> None:
        self._writer.close()
