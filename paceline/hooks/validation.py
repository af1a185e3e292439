"""Evaluate during the run."""

from dataclasses import dataclass

from paceline.hook import Session
from paceline.hooks._metric import shown
from paceline.hooks._periodic import EveryOrSeconds
from paceline.hooks._tensorboard import writer


@dataclass
class Validation(EveryOrSeconds):
    """The chief evaluates every `every` updates (100 if neither is given) or `seconds`, prints and records the metrics.

    In a run with a directory they are drawn in TensorBoard too: `summaries/validation`, a folder of its own, as
    TensorBoard follows only the newest file of a folder.
    """

    def begin(self, session: Session) -> None:
        super().begin(session)
        folder = session.directory
        self._writer = None if folder is None else writer(folder / "summaries" / "validation")

    def act(self, session: Session) -> None:
        step, metrics = session.updates, session.evaluate()
        session.say(f"validation: update {step}  {session.seconds:.4g} s  {shown(metrics)}")
        session.record(metrics)
        if self._writer is not None:
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, global_step=step)
            self._writer.flush()

    def end(self, session: Session) -> None:
        if self._writer is not None:
            self._writer.close()
