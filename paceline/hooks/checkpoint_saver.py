"""Save checkpoints during the run."""

from dataclasses import dataclass

from paceline.hook import Session
from paceline.hooks._periodic import EveryOrSeconds


@dataclass
class CheckpointSaver(EveryOrSeconds):
    """Asks for a checkpoint of the whole run every `every` updates or every `seconds` (60 if neither is given)."""

    default = (None, 60.0)

    def act(self, session: Session) -> None:
        session.save()
