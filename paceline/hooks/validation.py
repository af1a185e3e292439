"""Evaluate on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.fields import Count, Rate
from paceline.hook import Role, Session
from paceline.hooks._metric import shown
from paceline.hooks._options import Checked
from paceline.hooks._periodic import Periodic
from paceline.hooks._tensorboard import writer


@dataclass
class Validation(Checked):
    """The chief evaluates every `every` updates (100 if nothing is said) or `seconds`, prints and records the metrics.

    In a run with a directory they are drawn in TensorBoard too: `summaries/validation`, a folder of its own, as
    TensorBoard follows only the newest file of a folder.
    """

    every: Count | None = None
    seconds: Rate | None = None
    roles: ClassVar[frozenset[Role]] = frozenset({"chief"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self._only_one("every", "seconds")

    def begin(self, session: Session) -> None:
        self._pace = Periodic(self.every or 100, self.seconds, session.updates, session.seconds)
        folder = session.directory
        self._writer = None if folder is None else writer(folder / "summaries" / "validation")

    def after_step(self, session: Session) -> None:
        if not self._pace.due(session.updates, session.seconds):
            return
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
