"""Means over seeds, their confidence intervals, and tests of differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from scipy.special import stdtr, stdtrit

LEVEL = 0.95
ALPHA = 0.05


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and half the width of its confidence interval; NaN for one seed: it says nothing."""

    mean: float
    half: float
    count: int

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


@dataclass(frozen=True)
class PairTest:
    """The difference of two arms in a quantity. `p`: of Welch's test; `corrected`: by Holm's method, over all pairs."""

    first: str
    second: str
    difference: float  # first - second
    p: float
    corrected: float

    @property
    def significant(self) -> bool:
        return self.corrected < ALPHA


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and confidence interval, by Student's t: values are few."""
    count = len(values)
    if not count:
        return Estimate(math.nan, math.nan, 0)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, math.nan, 1)
    return Estimate(mean, quantile(count - 1) * math.sqrt(variance(values) / count), count)


def quantile(degrees: float) -> float:
    """The number of standard errors to either side that a confidence interval has."""
    return float(stdtrit(degrees, (1 + LEVEL) / 2))


def variance(values: Sequence[float]) -> float:
    """The unbiased variance of a sample of at least two values."""
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def welch(first: Sequence[float], second: Sequence[float]) -> float:
    """The two-sided p of Welch's test: may both have one mean? It assumes no equal variances. NaN below two values."""
    if len(first) < 2 or len(second) < 2:
        return math.nan
    a, b = variance(first) / len(first), variance(second) / len(second)
    gap = math.fsum(first) / len(first) - math.fsum(second) / len(second)
    if a + b == 0:  # nothing varies: any difference is one
        return 1.0 if gap == 0 else 0.0
    degrees = (a + b) ** 2 / (a**2 / (len(first) - 1) + b**2 / (len(second) - 1))
    return float(2 * stdtr(degrees, -abs(gap) / math.sqrt(a + b)))


def holm(values: Sequence[float]) -> list[float]:
    """p values corrected for their number by Holm's method: the probability of any false finding stays below."""
    order = sorted(range(len(values)), key=lambda k: values[k])
    corrected, largest = [0.0] * len(values), 0.0
    for rank, k in enumerate(order):
        largest = max(largest, min(1.0, values[k] * (len(values) - rank)))
        corrected[k] = largest
    return corrected


def pair_tests(values: Mapping[str, Sequence[float]]) -> list[PairTest]:
    """All pairs of arms that have at least two values."""
    able = [name for name, found in values.items() if len(found) >= 2]
    pairs = list(combinations(able, 2))
    raw = [welch(values[a], values[b]) for a, b in pairs]
    gaps = [math.fsum(values[a]) / len(values[a]) - math.fsum(values[b]) / len(values[b]) for a, b in pairs]
    return [
        PairTest(a, b, gap, p, corrected) for (a, b), gap, p, corrected in zip(pairs, gaps, raw, holm(raw), strict=True)
    ]
