"""Hooks that send the values of a run to a service that keeps experiments."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from paceline.errors import UsageError
from paceline.fields import Natural
from paceline.hook import Session
from paceline.hooks._metric import Gauges
from paceline.hooks._periodic import EveryOrSeconds, Timer


@dataclass
class Tracker(EveryOrSeconds):
    """Sends the chief's values every `every` updates (100 if neither is given) or `seconds`. With `evaluate` it also
    evaluates every N updates, and at the end. `run` is the name of the run there."""

    evaluate: Natural = 0
    run: str = ""

    def begin(self, session: Session) -> None:
        super().begin(session)
        self._gauges, self._failed = Gauges(session), False
        self._evaluations = Timer(self.evaluate or None, None, session.updates, session.seconds)
        folder = session.directory
        self.open(session, self.run or (folder.resolve().name if folder is not None else "simulation"), _plan(session))

    def before_step(self, session: Session) -> None:
        if self._timer.near(self.count(session), session.seconds):
            self._gauges.prepare(session)

    def after_step(self, session: Session) -> None:
        super().after_step(session)
        if self.evaluate and self._evaluations.due(session.updates, session.seconds):
            self._send_metrics(session)

    def act(self, session: Session) -> None:
        self.send(session, self._gauges.measure(session))

    def failed(self, session: Session, error: BaseException) -> None:
        self._failed = True

    def end(self, session: Session) -> None:
        try:
            if self.evaluate and not self._failed:
                self._send_metrics(session)
        finally:
            self.close(failed=self._failed)

    def _send_metrics(self, session: Session) -> None:
        self.send(session, {f"test_{name}": value for name, value in session.evaluate().items()})

    @abstractmethod
    def open(self, session: Session, name: str, plan: dict[str, Any]) -> None:
        """Begin a run of that name, or continue it: the chief may have been restarted, or the run resumed."""

    @abstractmethod
    def send(self, session: Session, values: Mapping[str, float]) -> None:
        """Send values of this moment."""

    @abstractmethod
    def close(self, *, failed: bool) -> None: ...


def package(hook: str, name: str) -> Any:
    """An optional package; UsageError says how it is installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        how = f"install it: pip install 'paceline[{hook}]'"
        raise UsageError(f"the hook {hook} needs the package {name}; {how}") from error


def _plan(session: Session) -> dict[str, Any]:
    """The settings of the run, as plan.json has them."""
    path = None if session.directory is None else session.directory / "plan.json"
    if path is None or not path.exists():
        return {}
    plan: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {name: value for name, value in plan.items() if value not in (None, "", [], {})}
