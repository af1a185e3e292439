"""Fail or stop when a loss is not a finite number."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from paceline.errors import LossError
from paceline.hook import Session
from paceline.hooks._options import Checked


@dataclass
class NanGuard(Checked):
    """When a loss is NaN or infinite: `fail` ends the run with an error, `stop` ends it without one."""

    action: Literal["fail", "stop"] = "fail"
    guards_loss: ClassVar[bool] = True

    def after_gradient(self, session: Session, loss: float) -> None:
        if math.isfinite(loss):
            return
        worker = session.worker
        what = f"worker:{worker.rank}, step {worker.t}, update {session.updates}: the loss is {loss}"
        if self.action == "stop":
            session.stop(what)
        else:
            raise LossError(f"{what}; a smaller lr (or fewer workers at this lr) is the usual cure")
