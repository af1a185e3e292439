"""Stop after a number of steps."""

from dataclasses import dataclass

from paceline.fields import Count
from paceline.hook import Session
from paceline.hooks._options import Checked


@dataclass
class StopAtStep(Checked):
    """Ends the run at global step `last_step`, or lets each worker leave after `num_steps` global steps.

    The global step counts the updates of the centre. `num_steps` is counted by each worker from the global step at
    which its own first step begins, so a late worker takes part for as long. The run ends when all have left.
    """

    last_step: Count | None = None
    num_steps: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._only_one("last_step", "num_steps", needed=True)

    def begin(self, session: Session) -> None:
        self._base: int | None = None
        self._stopped = False
        self._stop_if_reached(session)  # a resumed run may be past it already

    def before_step(self, session: Session) -> None:
        if self._base is None:  # not in begin: a worker may wait there while the others make steps
            self._base = session.updates

    def after_gradient(self, session: Session, loss: float) -> None:
        self._stop_if_reached(session)  # before this gradient makes one update more

    def after_step(self, session: Session) -> None:
        self._stop_if_reached(session)
        if self.num_steps is not None and self._base is not None and session.updates >= self._base + self.num_steps:
            session.leave(f"{self.num_steps} global steps since update {self._base}")

    def _stop_if_reached(self, session: Session) -> None:
        if self.last_step is not None and session.updates >= self.last_step and not self._stopped:
            self._stopped = True
            session.stop(f"global step {session.updates} reached the last step {self.last_step}")
