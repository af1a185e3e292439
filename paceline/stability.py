"""Stability limits on a quadratic of curvature h, in terms of c = lr * h, and the warnings that schemes make of them.

A scheme chooses its warning by one line, `warnings = stability.asynchronous`; its `gain` says what c is for it.
Constant delay and elastic limits are exact; those for exponential workers are mean-square.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.rules import SGD

if TYPE_CHECKING:
    from paceline.scheme import Scheme


class Gain(NamedTuple):
    """The share of the distance to the optimum that one update covers, and what the warning calls it."""

    share: float
    what: str = "lr * curvature"

    def divided(self, by: int) -> Gain:
        return self._replace(share=self.share / by)


def constant_delay(delay: int) -> float:
    """Largest stable c when every gradient is `delay` versions old (workers in turn: delay = workers - 1)."""
    return 2 * math.sin(math.pi / (2 * (2 * delay + 1)))


def exponential_workers(workers: int) -> float:
    """Largest c that is stable in mean square for equal workers with exponential times: N c^2 - c - 2 < 0."""
    return (1 + math.sqrt(1 + 8 * workers)) / (2 * workers)


def window_gain(c: float, window: int) -> float:
    """The share of the distance to the optimum that one push of a window covers."""
    return 1 - (1 - c) ** window


def windowed(scheme: Any, curvature: float) -> Gain | None:
    """The gain of a scheme with a window of local steps, a rule for them and one at the server; None: not plain SGD."""
    if type(scheme.rule) is not SGD or type(scheme.server_rule) is not SGD:
        return None
    local, central = scheme.rule.rate(scheme.lr), scheme.server_rule.rate(scheme.lr)
    share = window_gain(local * curvature, scheme.window) * (central / local if local else 0.0)
    return Gain(share, f"the gain of a window of {scheme.window}")


def easgd_beta(c: float, workers: int) -> float:
    """Largest stable beta of synchronous elastic averaging."""
    return (4 - 2 * c) / (2 * (1 + 1 / workers) - c)


def aeasgd_alpha(c: float) -> float:
    """Largest stable alpha for any number of workers that exchange in turn."""
    return (4 - 2 * c) / (4 - c)


def synchronous(scheme: Scheme, workers: int, curvature: float | None) -> Iterator[str]:
    """The warning of a scheme whose gradients are never stale."""
    gain = None if curvature is None else scheme.gain(workers, curvature)
    if gain is not None and not 0 <= gain.share < 2:
        limit = 2 if gain.share >= 2 else 0
        yield f"{gain.what} = {gain.share:.3g} crosses {limit}, the stability limit of synchronous SGD: it will diverge"


def asynchronous(scheme: Scheme, workers: int, curvature: float | None) -> Iterator[str]:
    """The warnings of a scheme whose pushes are `workers` - 1 versions old on average."""
    gain = None if curvature is None else scheme.gain(workers, curvature)
    turn, random = constant_delay(workers - 1), exponential_workers(workers)
    if gain is not None and gain.share >= turn:
        yield (
            f"{gain.what} = {gain.share:.3g} crosses {turn:.3g}, the stability limit of {workers} asynchronous workers "
            f"in turn (with exponential times: {random:.3g})"
        )
    elif gain is not None and gain.share < 0:
        yield f"{gain.what} = {gain.share:.3g} is below 0: lr * curvature is above 2, so the local steps diverge"
    rule = getattr(scheme, "server_rule", None) or getattr(scheme, "rule", None)
    momentum = getattr(rule, "momentum", 0.0)
    if momentum >= 0.9 and workers > 4:
        yield (
            f"momentum {momentum:g} with {workers} asynchronous workers: they add an implicit momentum of "
            f"{1 - 1 / workers:.2g}; lower it as workers are added"
        )
