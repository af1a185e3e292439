"""Chooses hyper-parameters for each scheme on a budget: shorter runs, with a seed that the comparison does not use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.experiments.arms import Arm, Sweep
from paceline.experiments.cells import DONE, CellOutcome
from paceline.experiments.length import rising


@dataclass(frozen=True)
class Trial:
    """One combination of swept values, and the metrics that a run with them has reached; None: diverged or failed."""

    values: dict[str, str]
    metrics: dict[str, float] | None


@dataclass(frozen=True)
class Tuned:
    """What a sweep has found for an arm."""

    arm: Arm  # with the values that were chosen
    trials: list[Trial]
    chosen: dict[str, str]
    edges: list[str]  # hyper-parameters whose best value is the least or largest of those tried

    @property
    def text(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.chosen.items())


def tuned(arm: Arm, sweep: Sweep, outcomes: Sequence[tuple[dict[str, str], CellOutcome]], metric: str) -> Tuned:
    """The best combination by a metric; if all have failed, the first one."""
    trials = [Trial(values, one.final if one.status == DONE else None) for values, one in outcomes]
    worked = [trial for trial in trials if trial.metrics is not None]
    best = min(worked, key=lambda trial: _badness(trial.metrics or {}, metric)) if worked else trials[0]
    edges = [key for key, value in best.values.items() if worked and _at_an_edge(value, sweep.values[key])]
    return Tuned(arm.with_hyper(best.values), trials, best.values, edges)


def _badness(metrics: Mapping[str, float], metric: str) -> tuple[float, float]:
    """Less is better; equal metrics are told apart by the loss."""
    value = metrics.get(metric, math.nan)
    bad = -value if rising(metric) else value
    return (math.inf if math.isnan(bad) else bad, metrics.get("loss", math.inf))


def _at_an_edge(value: str, options: Sequence[str]) -> bool:
    try:
        numbers = sorted(float(one) for one in options)
        return float(value) in (numbers[0], numbers[-1])
    except ValueError:  # a rule, a schedule: they have no order
        return False
