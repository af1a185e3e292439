"""Print the speed of the run."""

from dataclasses import dataclass

from paceline.hook import Session
from paceline.hooks._metric import Speed, traffic
from paceline.hooks._periodic import EveryOrSeconds


@dataclass
class StepCounter(EveryOrSeconds):
    """Prints and records updates and samples per second, every `every` updates (100 if neither is given) or `seconds`.

    Each figure is the mean since the one before. The bytes that all workers have sent and received so far are recorded
    too.
    """

    def begin(self, session: Session) -> None:
        super().begin(session)
        self._speed: Speed | None = None

    def before_step(self, session: Session) -> None:
        if self._speed is None:  # the time of the start does not count
            self._speed = Speed(session)

    def act(self, session: Session) -> None:
        rates = self._speed.measure(session) if self._speed is not None else {}
        if rates:
            session.say(
                f"update {session.updates}: {rates['updates_per_second']:.4g} updates/s, "
                f"{rates['samples_per_second']:.4g} samples/s"
            )
            session.record(rates | traffic(session))
