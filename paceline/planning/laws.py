"""Laws of gradient times for a plan: which law fits what was measured, and sums of several gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from paceline.compute_times import ComputeTime, Constant, Gamma, LogNormal, Rng, ShiftedExponential
from paceline.planning.spelling import Stragglers

STEADY = 0.005  # a smaller coefficient of variation counts as none
DRAWS = 20_000  # for the mean of a law
JITTER = 0.002
WINDOW = 5  # gradients of a window that are simulated one by one


@dataclass(frozen=True)
class Scaled(ComputeTime):
    """`seconds` times what another law draws, divided by that law's mean."""

    law: ComputeTime
    seconds: float = 1.0
    mean: float = 1.0

    def draw(self, rank: int, t: int, rng: Rng) -> float:
        return self.seconds / self.mean * self.law.draw(rank, t, rng)


@dataclass(frozen=True)
class SumOf(ComputeTime):
    """The time of `number` gradients of a law, one after the other, and `extra` seconds for each."""

    law: ComputeTime
    number: int = 1
    extra: float = 0.0

    def draw(self, rank: int, t: int, rng: Rng) -> float:
        return sum(self.law.draw(rank, t * self.number + k, rng) for k in range(self.number)) + self.number * self.extra


def mean_of_law(law: ComputeTime) -> float:
    """By drawing: a law without a mean gets that of the draws."""
    if isinstance(law, Constant):
        return law.seconds
    rng = np.random.Generator(np.random.PCG64(7))
    return float(np.mean([law.draw(0, t, rng) for t in range(DRAWS)]))


def forecast_law(measured: ComputeTime, mean: float, stragglers: Stragglers) -> ComputeTime:
    """The law of a gradient's time with this mean. Slow nodes are speeds, not part of it. Constant times get a jitter
    of a fifth of a percent: without it workers stay in step for ever, and queue at the server all at once."""
    law = measured if stragglers.factors is None else stragglers.factors
    if isinstance(law, Constant):
        return Gamma(mean, JITTER)
    return Scaled(law, mean, mean_of_law(law))


def fitted(times: Sequence[float]) -> ComputeTime:
    """Of constant, gamma, log-normal and shifted exponential the law that makes these times most likely, by Akaike's
    criterion. All have the mean that was measured, or nearly."""
    values = np.asarray(times, dtype=float)
    mean, spread = float(values.mean()), float(values.std())
    if len(values) < 3 or spread < STEADY * mean:
        return Constant(mean)
    logs = np.log(values)
    shift = float(values.min()) - (mean - float(values.min())) / len(values)  # the bias of the least value
    found: list[tuple[float, ComputeTime]] = []
    gamma = Gamma(mean, spread / mean)
    shape, scale = gamma.variation**-2, mean * gamma.variation**2
    found.append((_likelihood(values, lambda x: _gamma_density(x, shape, scale)) - 2, gamma))
    normal = LogNormal(float(np.exp(logs.mean())), max(float(logs.std()), 1e-9))
    found.append((_likelihood(values, lambda x: _log_normal_density(x, normal)) - 2, normal))
    if shift > 0:
        late = ShiftedExponential(shift, mean - shift)
        found.append((_likelihood(values, lambda x: _exponential_density(x, late)) - 2, late))
    return max(found, key=lambda one: one[0])[1]


def law_text(law: ComputeTime) -> str:
    """As `--compute` takes it."""
    return f"{law.name}:{','.join(f'{getattr(law, one.name):.6g}' for one in fields(law))}"


def _likelihood(values: np.ndarray, density: Callable[[float], float]) -> float:
    return sum(density(float(x)) for x in values)


def _gamma_density(x: float, shape: float, scale: float) -> float:
    return (shape - 1) * math.log(x) - x / scale - math.lgamma(shape) - shape * math.log(scale)


def _log_normal_density(x: float, law: LogNormal) -> float:
    z = (math.log(x) - math.log(law.median)) / law.sigma
    return -0.5 * z * z - math.log(x * law.sigma * math.sqrt(2 * math.pi))


def _exponential_density(x: float, law: ShiftedExponential) -> float:
    return -math.log(law.mean) - (x - law.shift) / law.mean if x >= law.shift else -math.inf
