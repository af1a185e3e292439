"""A hook that keeps a run from being over before all blows have been dealt."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from paceline.hook import Hook, Session

STEP = 0.02  # seconds of a step meanwhile


@dataclass
class Linger(Hook):
    """From an update on steps are slow, until the gate is there."""

    gate: str
    update: int

    def before_step(self, session: Session) -> None:
        if session.updates >= self.update and not Path(self.gate).exists():
            threading.Event().wait(STEP)
