"""Limits of stability on a quadratic of curvature h, in terms of c = lr * h. Schemes turn them into warnings.

Constant delay and elastic limits are exact; those for exponential workers are mean-square.
"""

from __future__ import annotations

import math
from collections.abc import Iterator


def constant_delay(delay: int) -> float:
    """Largest stable c when every gradient is `delay` versions old (workers in turn: delay = workers - 1)."""
    return 2 * math.sin(math.pi / (2 * (2 * delay + 1)))


def exponential_workers(workers: int) -> float:
    """Largest c that is stable in mean square for equal workers with exponential times: N c^2 - c - 2 < 0."""
    return (1 + math.sqrt(1 + 8 * workers)) / (2 * workers)


def window_gain(c: float, window: int, *, normalised: bool = False) -> float:
    """The share of the distance to the optimum that one push of a window covers; normalised: AGN's mean."""
    gain = 1 - (1 - c) ** window
    return gain / window if normalised else gain


def easgd_beta(c: float, workers: int) -> float:
    """Largest stable beta of synchronous elastic averaging."""
    return (4 - 2 * c) / (2 * (1 + 1 / workers) - c)


def aeasgd_alpha(c: float) -> float:
    """Largest alpha that is stable for every number of workers in turn."""
    return (4 - 2 * c) / (4 - c)


def synchronous(gain: float, what: str = "lr * curvature") -> Iterator[str]:
    """The warning of every scheme whose gradients are fresh."""
    if not 0 <= gain < 2:
        limit = 2 if gain >= 2 else 0
        yield f"{what} = {gain:.3g} crosses {limit}, the stability limit of synchronous SGD: it will diverge"


def asynchronous(gain: float, workers: int, what: str = "lr * curvature") -> Iterator[str]:
    """The warning of every scheme whose pushes are `workers` - 1 versions old on average."""
    turn, random = constant_delay(workers - 1), exponential_workers(workers)
    if gain >= turn:
        yield (
            f"{what} = {gain:.3g} crosses {turn:.3g}, the stability limit of {workers} asynchronous workers in turn "
            f"(with exponential times: {random:.3g})"
        )
    elif gain < 0:
        yield f"{what} = {gain:.3g} is below 0: lr * curvature is above 2, so the local steps themselves diverge"


def asynchronous_momentum(momentum: float, workers: int) -> Iterator[str]:
    """Asynchrony brings momentum of its own."""
    if momentum >= 0.9 and workers > 4:
        yield (
            f"momentum {momentum:g} with {workers} asynchronous workers: they add an implicit momentum of "
            f"{1 - 1 / workers:.2g}; lower it as workers are added"
        )
