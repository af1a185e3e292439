"""Figures of a run: metrics by name, whether they should rise or fall, and the speed."""

from collections.abc import Mapping

from paceline.errors import UsageError
from paceline.hook import Session


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
