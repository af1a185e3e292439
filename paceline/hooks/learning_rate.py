"""Change the learning rate during the run."""

from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.fields import Count, Natural, Rate
from paceline.hook import Session
from paceline.hooks._options import Checked
from paceline.schedules import Kind, Schedule


@dataclass
class LearningRate(Checked):
    """Sets the learning rate as a function of the global step, from `base` on: `lr=KIND:BASE,…` says the same.

    After `warmup` updates, in which it grows evenly up to `base`, n further updates give

        constant      base
        step          base * gamma ^ floor(n / over)
        exponential   base * gamma ^ (n / over)
        linear        evenly from base down to `lowest` in `over` updates
        cosine        the same along half a cosine

    A rate belongs to an update: who makes it uses the rate of the version that it changes. A worker's own steps use the
    rate of the version that the worker holds. `key` is the hyper-parameter that follows: lr, server.lr or rule.lr. It
    changes at most every `every` updates.
    """

    base: Rate | None = None
    kind: Kind = "constant"
    over: Count | None = None
    gamma: Rate = 0.1
    lowest: Rate = 0.0
    warmup: Natural = 0
    key: str = "lr"
    every: Count = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base is None:
            raise UsageError(f"{self.name}: give base=RATE, the learning rate to begin with")
        if self.kind != "constant" and self.over is None:
            raise UsageError(f"{self.name}: kind={self.kind} needs over=UPDATES, the updates that its change takes")
        options = {"over": self.over or 0, "gamma": self.gamma, "lowest": self.lowest, "warmup": self.warmup}
        self._schedule = Schedule(self.base, self.kind, every=self.every, **options)

    def begin(self, session: Session) -> None:
        self._follow(session)

    def before_step(self, session: Session) -> None:
        self._follow(session)  # the run may have returned to a checkpoint from before the beginning

    def _follow(self, session: Session) -> None:
        """Let the scheme look the rate up by the version that it is used for: each process then finds the same one."""
        if session.value(self.key) != self._schedule:
            session.set(**{self.key: str(self._schedule)})
