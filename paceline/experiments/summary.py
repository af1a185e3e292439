"""The findings of a comparison as numbers: of each arm over its seeds, and of the differences between arms."""

from __future__ import annotations

import math
import statistics as plain_statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paceline.experiments.arms import Arm
from paceline.experiments.cells import DIVERGED, DONE, FAILED, CellOutcome, Moment
from paceline.experiments.length import Goal, Length, rising
from paceline.experiments.staleness_theory import ExpectedStaleness
from paceline.experiments.statistics import Estimate, PairTest, estimate, pair_tests, quantile
from paceline.experiments.tuning import Tuned

Numbers = NDArray[np.float64]
AXES: dict[str, Callable[[Moment], float]] = {
    "updates": lambda one: one.update,
    "samples": lambda one: one.samples,
    "seconds": lambda one: one.seconds,
}
GRID = 101  # points at which curves of several seeds are averaged


@dataclass(frozen=True)
class Band:
    """A curve over seeds: the mean, and the confidence interval of it (NaN for one seed)."""

    x: Numbers
    mean: Numbers
    low: Numbers
    high: Numbers


@dataclass(frozen=True)
class ArmSummary:
    """One arm over its seeds."""

    arm: Arm
    seeds: Sequence[int]
    outcomes: Sequence[CellOutcome]
    tuned: Tuned | None = None
    theory: ExpectedStaleness | None = None

    @property
    def label(self) -> str:
        return self.arm.label

    @cached_property
    def finished(self) -> list[CellOutcome]:
        return [one for one in self.outcomes if one.status == DONE]

    @property
    def whole(self) -> bool:
        """Every seed has an end, so that the arm can be compared."""
        return len(self.finished) == len(self.outcomes)

    @property
    def trouble(self) -> str:
        """What became of seeds that have no end: diverged (2 of 3 seeds)."""
        counts = Counter(one.status for one in self.outcomes if one.status != DONE)
        number = len(self.outcomes)
        parts = [f"{word} ({counts[word]} of {number} seeds)" for word in (DIVERGED, FAILED) if counts[word]]
        return ", ".join(parts)

    @property
    def reason(self) -> str:
        """Why the first seed without an end has none."""
        return next((one.reason for one in self.outcomes if one.status != DONE), "")

    @property
    def unlearned(self) -> bool:
        """Its mean loss at the end is not below that of the start."""
        pairs = [(one.moments[0].metrics.get("loss"), one.final.get("loss")) for one in self.finished if one.moments]
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        return bool(known) and sum(b for _, b in known) >= sum(a for a, _ in known)

    def values(self, metric: str) -> list[float]:
        """The metric at the end of each seed that has one."""
        return [one.final[metric] for one in self.finished if metric in one.final]

    def final(self, metric: str) -> Estimate:
        return estimate(self.values(metric))

    @property
    def seconds(self) -> list[float]:
        return [one.seconds for one in self.finished]

    @property
    def bytes_per_worker(self) -> list[float]:
        return [one.bytes_sent / self.arm.workers for one in self.finished if one.bytes_sent is not None]

    def times_to(self, goal: Goal) -> list[float | None]:
        """The seconds after which each seed has first reached a goal; None: it has not."""
        return [
            next((one.seconds for one in outcome.moments if goal.reached(one.metrics)), None)
            for outcome in self.outcomes
        ]

    @cached_property
    def staleness(self) -> dict[int, int]:
        """The histogram of all seeds together."""
        total: Counter[int] = Counter()
        for one in self.finished:
            total.update(one.staleness)
        return dict(sorted(total.items()))

    @property
    def mean_staleness(self) -> float:
        count = sum(self.staleness.values())
        return sum(tau * n for tau, n in self.staleness.items()) / count if count else math.nan

    def band(self, metric: str, axis: str, *, logarithmic: bool = False) -> Band | None:
        """The metric against updates, samples or seconds, over seeds: interpolated between evaluations. For a
        logarithmic axis it begins at the first evaluation after the start."""
        curves = []
        for one in self.finished:
            points = [
                (AXES[axis](m), m.metrics[metric])
                for m in one.moments
                if math.isfinite(m.metrics.get(metric, math.nan))
            ]
            if len(points) >= 2:
                curves.append(np.array(points, dtype=np.float64).T)
        if not curves:
            return None
        last = min(curve[0][-1] for curve in curves)
        x = np.linspace(0.0, last, GRID)
        if logarithmic:
            x = np.geomspace(min(max(curve[0][1] for curve in curves), last), last, GRID)
        rows = np.stack([np.interp(x, curve[0], curve[1]) for curve in curves])
        mean = rows.mean(axis=0)
        half = np.full_like(mean, np.nan)
        if len(rows) > 1:
            half = quantile(len(rows) - 1) * rows.std(axis=0, ddof=1) / math.sqrt(len(rows))
        return Band(x, mean, mean - half, mean + half)


@dataclass(frozen=True)
class Findings:
    """All numbers of a comparison."""

    task: str
    real: bool
    length: Length
    seeds: Sequence[int]
    metric: str  # by which arms are compared
    arms: Sequence[ArmSummary]
    setting: dict[str, str] = field(default_factory=dict)  # what else all runs have in common, for people
    swept: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def unit(self) -> str:
        return "wall seconds" if self.real else "virtual seconds"

    @cached_property
    def metrics(self) -> list[str]:
        """The names of all metrics that runs have."""
        return list(
            dict.fromkeys(name for one in self.arms for run in one.outcomes for m in run.moments for name in m.metrics)
        )

    @cached_property
    def compared(self) -> list[ArmSummary]:
        """The arms of which all seeds have an end."""
        return [one for one in self.arms if one.whole]

    @cached_property
    def ranked(self) -> list[ArmSummary]:
        """The arms that can be compared, the best first: by the final metric, or by the time to the target that was
        given, then by the seeds that have reached it."""
        sign = -1 if rising(self.metric) else 1
        if self.length.target is not None:
            return sorted(self.compared, key=lambda one: _time_to(self.times_to_goal(one)))
        return sorted(self.compared, key=lambda one: sign * one.final(self.metric).mean)

    @cached_property
    def goal(self) -> Goal | None:
        """The target; if none was given, the value that half of the arms have reached at their end."""
        if self.length.target is not None:
            return self.length.target
        ends = [one.final(self.metric).mean for one in self.compared if not one.unlearned]
        if not ends:
            return None
        middle = plain_statistics.median_low(ends) if rising(self.metric) else plain_statistics.median_high(ends)
        digits = 3 if rising(self.metric) else 2
        step = 10.0 ** (math.floor(math.log10(abs(middle))) + 1 - digits) if middle else 1.0
        value = math.floor(middle / step) * step if rising(self.metric) else math.ceil(middle / step) * step
        return Goal(self.metric, float(f"{value:.12g}"))

    def times_to_goal(self, one: ArmSummary) -> list[float | None]:
        return [] if self.goal is None else one.times_to(self.goal)

    @cached_property
    def metric_tests(self) -> list[PairTest]:
        return pair_tests({one.label: one.values(self.metric) for one in self.ranked})

    @cached_property
    def time_tests(self) -> list[PairTest]:
        """Of the time that equal work takes; none if all runs had the same time."""
        if self.length.seconds is not None or self.length.target is not None:
            return []
        return pair_tests({one.label: one.seconds for one in self.compared})

    @property
    def ranked_by(self) -> str:
        """What the best arm is the best in."""
        if self.length.target is not None:
            return f"the time to {self.length.target}"
        return f"{self.metric} at the end of the runs"

    @property
    def main_tests(self) -> list[PairTest]:
        """Of what the runs are ranked by."""
        return self.goal_tests if self.length.target is not None else self.metric_tests

    @cached_property
    def goal_tests(self) -> list[PairTest]:
        """Of the time to the goal, between arms of which every seed has reached it."""
        times = {one.label: self.times_to_goal(one) for one in self.compared}
        reached = {label: [t for t in found if t is not None] for label, found in times.items() if None not in found}
        return pair_tests({label: found for label, found in reached.items() if found})


def _time_to(times: Sequence[float | None]) -> tuple[int, float]:
    """What arms are sorted by: seeds that have not reached the target, then the mean time of the others."""
    reached = [t for t in times if t is not None]
    return len(times) - len(reached), math.fsum(reached) / len(reached) if reached else math.inf
