"""Start all workers together."""

from dataclasses import dataclass

from paceline.hook import Hook, Session


@dataclass
class StartBarrier(Hook):
    """Holds every worker before its first step until all have begun: no worker gets a lead from a quick start."""

    def begin(self, session: Session) -> None:
        workers = session.worker.workers
        session.wait(lambda: session.begun() >= workers, f"all {workers} workers to begin")
