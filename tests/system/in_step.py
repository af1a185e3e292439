"""A hook for tests that are about all workers: of a run of few and fast steps one worker may make all otherwise."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from paceline.hook import Hook, Session


@dataclass
class InStep(Hook):
    """No worker's first steps are ahead of another's. `folder` is empty at the start of the run."""

    folder: str
    workers: int = 2
    steps: int = 20

    def begin(self, session: Session) -> None:
        self._begun = 0

    def before_step(self, session: Session) -> None:
        if self._begun >= self.steps:
            return
        self._begun += 1
        folder = Path(self.folder)
        with (folder / f"begun-{session.worker.rank}").open("ab") as file:
            file.write(b".")
        while not all(
            path.exists() and path.stat().st_size >= self._begun
            for path in (folder / f"begun-{rank}" for rank in range(self.workers))
        ):
            os.sched_yield()
