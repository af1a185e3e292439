"""Start the workers one after the other."""

from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.fields import Count, Natural
from paceline.hook import Session
from paceline.hooks._options import Checked


@dataclass
class GlobalStepWaiter(Checked):
    """Lets worker r begin only when the global step has reached r times `step`; barriers do not wait for it meanwhile.

    With `ranks` only those wait, and each until `step` itself. A late start of most workers steadies the first,
    noisy updates of asynchronous schemes.
    """

    step: Count = 100
    ranks: tuple[Natural, ...] = ()

    def begin(self, session: Session) -> None:
        worker = session.worker
        if set(self.ranks) >= set(range(worker.workers)):
            raise UsageError(
                f"{self.name}: all {worker.workers} workers would wait for a global step that no worker makes; "
                "omit one from ranks"
            )
        until = (self.step if worker.rank in self.ranks else 0) if self.ranks else worker.rank * self.step
        if until:
            session.wait(lambda: session.updates >= until, f"global step {until}", away=True)
