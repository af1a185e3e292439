"""How the runs of a comparison are made equal: by samples (equal work), by seconds, or by a target."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from paceline.config.comparison import GRADIENTS, LIMIT, ComparisonSettings
from paceline.errors import UnknownName, UsageError
from paceline.task import Task

RISING = ("accuracy",)  # metrics of which more is better; of all others less


@dataclass(frozen=True)
class Goal:
    """A value of a metric that is to be reached."""

    metric: str
    value: float

    @classmethod
    def read(cls, text: str, known: dict[str, float]) -> Goal:
        """From `accuracy=0.97`; `known`: the metrics of the task."""
        metric, equals, number = text.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not equals or not math.isfinite(value):
            raise UsageError(f"target must be METRIC=VALUE, such as accuracy=0.97, not {text!r}")
        if metric not in known:
            raise UnknownName("metric of this task", metric, known)
        return cls(metric, value)

    def reached(self, metrics: dict[str, float]) -> bool:
        value = metrics.get(self.metric, math.nan)
        return value >= self.value if rising(self.metric) else value <= self.value

    def __str__(self) -> str:
        return f"{self.metric} {'≥' if rising(self.metric) else '≤'} {self.value:g}"


def rising(metric: str) -> bool:
    """Whether more of it is better."""
    return metric in RISING


@dataclass(frozen=True)
class Length:
    """When a run ends: after samples or seconds, and before that if it has reached the target."""

    samples: int | None
    seconds: float | None
    target: Goal | None = None
    chosen: bool = False  # nobody gave it: it is the default

    @property
    def unit(self) -> str:
        return "samples" if self.samples is not None else "seconds"

    def part(self, share: float) -> Length:
        """A shorter one; a target does not end it."""
        samples = None if self.samples is None else max(1, math.ceil(self.samples * share))
        return replace(self, samples=samples, seconds=self.seconds and self.seconds * share, target=None)

    def text(self, virtual: bool) -> str:
        """In words."""
        if self.samples is not None:
            text = f"{self.samples:,} samples"
        else:
            text = f"{self.seconds:,g} {'virtual' if virtual else 'wall'} seconds"
        return text if self.target is None else f"until {self.target}, at most {text}"


def length_of(asked: ComparisonSettings, task: Task, metrics: dict[str, float]) -> Length:
    """The length that was asked for, or the default. `metrics`: those of the task at its start."""
    if asked.samples is not None and asked.seconds is not None:
        raise UsageError("runs have equal work or equal time: give samples or seconds, not both")
    target = Goal.read(asked.target, metrics) if asked.target else None
    if asked.samples is not None or asked.seconds is not None:
        return Length(asked.samples, asked.seconds, target)
    if not task.batch:
        raise UsageError("the size of a batch is not known here: give samples, seconds or batch")
    return Length(task.batch * GRADIENTS * (LIMIT if target else 1), None, target, chosen=True)
