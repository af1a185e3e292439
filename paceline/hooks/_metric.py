"""Metrics by name, and which way is up."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.errors import UsageError


def metric_of(hook: str, metrics: Mapping[str, float], name: str) -> float:
    """A metric of the task; UsageError names those that it has."""
    if name not in metrics:
        raise UsageError(f"{hook}: the task has no metric {name!r}; it has {', '.join(metrics)}")
    return metrics[name]


def gain(name: str, value: float, over: float) -> float:
    """How much better a value is: `accuracy` should rise, everything else fall."""
    return value - over if name == "accuracy" else over - value


def shown(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
