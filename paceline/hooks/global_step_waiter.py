"""Start one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from paceline.errors import UsageError
from paceline.fields import Bound, Count
from paceline.hook import Session
from paceline.hooks._options import Checked

_Rank = Annotated[int, Bound(0)]


@dataclass
class GlobalStepWaiter(Checked):
    """Lets worker r begin only when the global step has reached r times `step`; barriers go on without it meanwhile.

    With `ranks` only those wait, and each until `step` itself. A late start of most workers steadies the first,
    noisy updates of asynchronous schemes.
    """

    step: Count = 100
    ranks: tuple[_Rank, ...] = ()

    def begin(self, session: Session) -> None:
        worker = session.worker
        if set(self.ranks) >= set(range(worker.workers)):
            raise UsageError(
                f"{self.name}: all {worker.workers} workers would wait for a global step that nobody makes; "
                "leave one out of ranks"
            )
        until = (self.step if worker.rank in self.ranks else 0) if self.ranks else worker.rank * self.step
        if until:
            session.wait(partial(_reached, session, until), f"global step {until}", away=True)


def _reached(session: Session, step: int) -> bool:
    return session.updates >= step
