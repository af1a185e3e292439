"""Laws of compute times: the seconds of a gradient, and the texts that name a law."""

import csv
import inspect
import math
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from paceline.errors import UnknownName, UsageError

Rng = np.random.Generator


@dataclass(frozen=True)
class ComputeTime:
    """A law for the seconds that one gradient takes."""

    name: ClassVar[str] = ""
    above_zero: ClassVar[tuple[str, ...]] = ()  # values that may not be 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = "".join(f"-{c.lower()}" if c.isupper() else c for c in cls.__name__).lstrip("-")

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, float) and not (value >= 0 and math.isfinite(value)):
                raise UsageError(f"{self.name}: {one.name} must be a finite number of at least 0, not {value:g}")
            if value == 0 and one.name in self.above_zero:
                raise UsageError(f"{self.name}: {one.name} must be above 0")

    def draw(self, rank: int, t: int, rng: Rng) -> float:
        """The seconds of worker `rank`'s gradient number t."""
        raise UsageError(f"{type(self).__name__} is not a law")

    def check(self) -> None:
        """Raise an error before the run if a file that the law reads is missing or damaged."""


@dataclass(frozen=True)
class Constant(ComputeTime):
    """Always `seconds`."""

    seconds: float = 1.0

    def draw(self, rank: int, t: int, rng: Rng) -> float:
        return self.seconds


@dataclass(frozen=True)
class Uniform(ComputeTime):
    """Between `low` and `high`, all equally likely."""

    low: float = 0.5
    high: float = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise UsageError(f"uniform: low ({self.low:g}) is above high ({self.high:g})")

    def draw(self, rank: int, t: int, rng: Rng) -> float:
        return self.low + (self.high - self.low) * rng.random()


@dataclass(frozen=True)
class Exponential(ComputeTime):
    """Memoryless, with this mean: the law of queueing theory."""

    mean: float = 1.0

    def draw(self, rank: int, t: int, rng: Rng) -> float:
        return self.mean * rng.standard_exponential()


@dataclass(frozen=True)
class ShiftedExponential(ComputeTime):
    """At least `shift`, then exponential with this mean."""

    shift: float = 1.0
    mean: float = 1.0

    def draw(self, rank: int, t: int, rng: Rng) -> float:
        return self.shift + self.mean * rng.standard_exponential()


@dataclass(frozen=True)
class LogNormal(ComputeTime):
    """exp(N(log median, sigma)): a medium tail."""

    median: float = 1.0
    sigma: float = 0.5

    def draw(self, rank: int, t: int, rng: Rng) -> float:
        return self.median * math.exp(self.sigma * rng.standard_normal())


@dataclass(frozen=True)
class Pareto(ComputeTime):
    """scale * U^(-1/shape): a heavy tail; the mean is infinite for shape <= 1."""

    above_zero = ("shape",)
    scale: float = 1.0
    shape: float = 2.0

    def draw(self, rank: int, t: int, rng: Rng) -> float:
        return float(self.scale * (1.0 - rng.random()) ** (-1.0 / self.shape))


@dataclass(frozen=True)
class Weibull(ComputeTime):
    """scale * E^(1/shape) with E exponential: heavier than exponential for shape < 1."""

    above_zero = ("shape",)
    scale: float = 1.0
    shape: float = 1.0

    def draw(self, rank: int, t: int, rng: Rng) -> float:
        return float(self.scale * rng.standard_exponential() ** (1.0 / self.shape))


@dataclass(frozen=True)
class Gamma(ComputeTime):
    """Gamma with this mean and coefficient of variation."""

    above_zero = ("variation",)
    mean: float = 1.0
    variation: float = 0.1

    def draw(self, rank: int, t: int, rng: Rng) -> float:
        return self.mean * self.variation**2 * rng.standard_gamma(self.variation**-2)


@dataclass(frozen=True)
class Slowdown(ComputeTime):
    """`seconds`, but `factor` times that with probability `chance`: stragglers that come and go."""

    seconds: float = 1.0
    factor: float = 5.0
    chance: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chance > 1:
            raise UsageError(f"slowdown: chance is a probability, from 0 to 1, not {self.chance:g}")

    def draw(self, rank: int, t: int, rng: Rng) -> float:
        return self.seconds * (self.factor if rng.random() < self.chance else 1.0)


@dataclass(frozen=True)
class Trace(ComputeTime):
    """Measured times from a file: lines `rank,seconds` (or `seconds` alone), repeated from the start at its end.

    A worker takes the lines of its own rank; more workers than ranks in the file share them in turn.
    """

    file: str

    @cached_property
    def _rows(self) -> list[list[float]]:
        path = Path(self.file)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"trace file {self.file!r} cannot be read: {error}") from None
        by_rank: dict[int, list[float]] = {}
        for number, row in enumerate(csv.reader(text.splitlines()), start=1):
            if not row or row[0].lstrip().startswith("#") or (number == 1 and not _is_number(row[-1])):
                continue  # empty, a comment, or the names of the columns
            try:
                rank, seconds = (int(row[0]), float(row[1])) if len(row) > 1 else (0, float(row[0]))
            except ValueError:
                raise UsageError(f"{self.file}:{number}: expected 'rank,seconds', found {row}") from None
            if rank < 0 or not (seconds >= 0 and math.isfinite(seconds)):
                raise UsageError(f"{self.file}:{number}: ranks and seconds are at least 0, found {row}")
            by_rank.setdefault(rank, []).append(seconds)
        if not by_rank:
            raise UsageError(f"trace file {self.file!r} has no times")
        return [by_rank[rank] for rank in sorted(by_rank)]

    def draw(self, rank: int, t: int, rng: Rng) -> float:
        row = self._rows[rank % len(self._rows)]
        return row[t % len(row)]

    def check(self) -> None:
        self._rows  # noqa: B018  reads the file


def laws() -> dict[str, type[ComputeTime]]:
    """Every law of this file, by name."""
    found = (value for value in globals().values() if inspect.isclass(value) and issubclass(value, ComputeTime))
    return {law.name: law for law in found if law is not ComputeTime}


def parse_times(text: str) -> ComputeTime:
    """`exponential:1.0`, `uniform:0.5,1.5`, `pareto:scale=1,shape=2`, `trace:times.csv`; a number is constant."""
    if _is_number(text):
        return Constant(float(text))
    name, _, rest = text.partition(":")
    known = laws()
    if name not in known:
        raise UnknownName("compute law", name, known)
    law: ComputeTime = filled(known[name], name, text, rest)
    return law


def filled(cls: Any, owner: str, whole: str, rest: str) -> Any:
    """A dataclass of numbers from `1,2` or `name=1,other=2`."""
    names = [one.name for one in fields(cls)]
    values: dict[str, Any] = {}
    for position, item in enumerate(filter(None, rest.split(","))):
        key, equals, value = item.partition("=")
        if not equals or cls is Trace:
            if position >= len(names):
                raise UsageError(f"{whole!r} has more values than {', '.join(names)}")
            key, value = names[position], item
        key = key.strip()
        if key not in names:
            raise UsageError(f"{owner}: {UnknownName('value', key, names)}")
        if cls is not Trace and not _is_number(value):
            raise UsageError(f"{whole!r}: {key} must be a number, not {value!r}")
        values[key] = value if cls is Trace else float(value)
    needed = [one.name for one in fields(cls) if one.default is MISSING and one.name not in values]
    if needed:
        raise UsageError(f"{whole!r} needs {', '.join(needed)}: {cls.name}:{','.join(map(str.upper, names))}")
    return cls(**values)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
