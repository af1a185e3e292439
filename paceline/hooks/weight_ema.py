"""Keep a moving average of the model."""

from dataclasses import dataclass
from typing import ClassVar

from paceline.fields import Count, Fraction
from paceline.hook import Session
from paceline.hooks._metric import shown
from paceline.hooks._periodic import Periodic

_KEPT = "ema"


@dataclass
class WeightEma(Periodic):
    """Keeps an exponential moving average of the centre and evaluates it at the end.

    After every `every` steps of the chief: average = decay * average + (1 - decay) * centre, from the first centre on.
    The average is saved in checkpoints; its metrics are recorded as `ema_loss`, ….
    """

    decay: Fraction = 0.999
    every: Count = 1
    of_steps: ClassVar[bool] = True

    def begin(self, session: Session) -> None:
        super().begin(session)
        centre, kept = session.model(), session.kept(_KEPT)
        self._average = centre if kept is None else kept.to(centre, copy=True)
        session.keep(_KEPT, self._average)

    def act(self, session: Session) -> None:
        self._average.lerp_(session.model(), 1 - self.decay)
        session.keep(_KEPT, self._average)

    def end(self, session: Session) -> None:
        metrics = session.evaluate(self._average)
        session.say(f"averaged model (decay {self.decay:g}): {shown(metrics)}")
        session.record({f"ema_{name}": value for name, value in metrics.items()})
