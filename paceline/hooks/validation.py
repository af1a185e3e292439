"""Evaluate during the run."""

from dataclasses import dataclass

from paceline.hook import Session
from paceline.hooks._metric import shown
from paceline.hooks._periodic import EveryOrSeconds
from paceline.runs.event_file import EventFile


@dataclass
class Validation(EveryOrSeconds):
    """The chief evaluates every `every` updates (100 if neither is given) or `seconds`, prints and records the metrics.

    In a run with a directory they are drawn in TensorBoard too: `summaries/validation`, a folder of its own, as
    TensorBoard follows only the newest file of a folder.
    """

    def begin(self, session: Session) -> None:
        super().begin(session)
        folder = session.directory
        self._file = None if folder is None else EventFile(folder / "summaries" / "validation")

    def act(self, session: Session) -> None:
        step, metrics = session.updates, session.evaluate()
        session.say(f"validation: update {step}  {session.seconds:.4g} s  {shown(metrics)}")
        session.record(metrics)
        if self._file is not None:
            self._file.scalars(metrics, step)
