"""Figures of a run: metrics by name, whether they should rise or fall, and the speed."""

import math
from collections.abc import Mapping

from paceline.errors import UnknownName, UsageError
from paceline.hook import Session
from paceline.result import Staleness
from paceline.schedules import Schedule


def metric_of(hook: str, metrics: Mapping[str, float], name: str) -> float:
    """A metric of the task; UsageError lists the metrics that it has."""
    if name not in metrics:
        raise UsageError(f"{hook}: the task has no metric {name!r}; it has {', '.join(metrics)}")
    return metrics[name]


def gain(name: str, value: float, over: float) -> float:
    """How much better a value is: `accuracy` should rise, all other metrics should fall."""
    return value - over if name == "accuracy" else over - value


def shown(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())


class Speed:
    """Updates and samples per second since the last measurement."""

    def __init__(self, session: Session) -> None:
        self._remember(session)

    def measure(self, session: Session) -> dict[str, float]:
        """The rates by name; empty if no time has passed."""
        elapsed = session.seconds - self._seconds
        if not elapsed > 0:
            return {}
        rates = {
            "updates_per_second": (session.updates - self._updates) / elapsed,
            "samples_per_second": (session.samples - self._samples) / elapsed,
        }
        self._remember(session)
        return rates

    def _remember(self, session: Session) -> None:
        self._seconds, self._updates, self._samples = session.seconds, session.updates, session.samples


class Gauges:
    """What a run can be watched by: the chief's loss, rate and gradient, the speed, the staleness, and the bytes that
    all workers have sent and received."""

    def __init__(self, session: Session) -> None:
        self._speed = Speed(session)
        self.prepare(session)

    def prepare(self, session: Session) -> None:
        """Have the next gradient measured: `measure` follows after this step."""
        session.gradient_norm()

    def measure(self, session: Session, staleness: Staleness | None = None) -> dict[str, float]:
        """Values by name; those that are not known are omitted. `staleness`: the session's, if it is known already."""
        norm = session.gradient_norm()
        return {
            "loss": session.worker.loss,
            **learning_rates(session),
            **({} if math.isnan(norm) else {"gradient_norm": norm}),
            "staleness_mean": (staleness or session.staleness).mean,
            **traffic(session),
            **self._speed.measure(session),
        }


def traffic(session: Session) -> dict[str, float]:
    """The bytes of all workers so far."""
    return {"bytes_sent": float(session.bytes_sent), "bytes_received": float(session.bytes_received)}


def learning_rates(session: Session) -> dict[str, float]:
    """The rates of the next update: of the scheme's rule, and of the server's if it has its own. An optimizer with
    parameter groups has none that is the rate of all."""
    known: dict[str, float] = {}
    for name, keys in (("learning_rate", ("rule.lr", "lr")), ("learning_rate_server", ("server.lr",))):
        for key in keys:
            try:
                value = session.value(key)
                rate = value.at(session.updates) if isinstance(value, Schedule) else value
            except UsageError:  # it has none, or one in units that this run does not count
                continue
            if isinstance(rate, int | float):
                known.setdefault(name, float(rate))
    try:
        grouped = getattr(session.value("rule"), "grouped", "")
    except UnknownName:
        grouped = ""
    if grouped or known.get("learning_rate_server") == known.get("learning_rate"):
        known.pop("learning_rate" if grouped else "learning_rate_server", None)
    return known
