"""What a plan holds: the forecast of every scheme at every number of workers, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal

from paceline.planning.failures import Failures
from paceline.planning.forecast import Assumptions
from paceline.planning.learning import Needed

Known = Literal["simulated", "at least", "not reached"]
ENOUGH = 0.5  # efficiency below which more workers are not worth while


@dataclass(frozen=True)
class PlanCell:
    """The forecast of a scheme on a number of workers. `rate`: samples per second, with failures; `bare`: without.
    `seconds` for the samples, or to the target; `known`: how well. `cost`: None without a price."""

    scheme: str
    workers: int
    nodes: int
    bare: float
    rate: float
    efficiency: float
    kept: float
    staleness: float
    samples: float | None = None
    seconds: float | None = None
    known: Known = "simulated"
    cost: float | None = None


@dataclass(frozen=True)
class Limit:
    """Where a scheme stops scaling, and why. `workers`: the largest number with an efficiency of at least a half; None:
    even the smallest has less. `obstacles`: what bounds it at the largest number, the first the most; `gain`: factor of
    the throughput if they were gone."""

    scheme: str
    workers: int | None
    obstacles: tuple[str, ...]
    gain: float


@dataclass(frozen=True)
class Variation:
    """An assumption that was changed: the throughput of the recommended scheme, and the scheme that is best then."""

    name: str
    change: float  # of the recommended scheme's time or throughput, as a factor of its throughput
    best: str
    flips: bool


@dataclass(frozen=True)
class CheckedCell:
    """A forecast for this machine beside what a real run here has done, in samples per second."""

    scheme: str
    workers: int
    forecast: float
    measured: float

    @property
    def error(self) -> float:
        return self.forecast / self.measured - 1


@dataclass(frozen=True)
class Forecast:
    """A finished plan. `page`: the report; `figures`: PNG and SVG files; `tables`: CSV files."""

    task: str
    schemes: Sequence[str]
    sizes: Sequence[int]
    given: Assumptions
    failures: Failures
    price: float
    samples: float | None
    needed: Needed | None
    cells: Sequence[PlanCell]
    limits: Sequence[Limit]
    variations: Sequence[Variation]
    checked: Sequence[CheckedCell]
    server_schemes: frozenset[str]
    notes: Sequence[str] = ()
    directory: str = ""
    page: str = ""
    figures: Sequence[str] = field(default=(), repr=False)
    tables: Sequence[str] = field(default=(), repr=False)

    def cell(self, scheme: str, workers: int) -> PlanCell:
        """The forecast of one scheme with one number of workers."""
        return next(one for one in self.cells if (one.scheme, one.workers) == (scheme, workers))

    def best(self, workers: int) -> PlanCell | None:
        """The scheme that is done first; without a target that of the highest throughput."""
        return fastest([one for one in self.cells if one.workers == workers])

    @property
    def recommended(self) -> PlanCell | None:
        """The best scheme at the largest number of workers at which it has an efficiency of at least a half; with a
        target only among numbers that were simulated with real gradients."""
        sizes = self.sizes if self.needed is None else self.needed.sizes
        found = [one for size in sizes if (one := self.best(size)) is not None]
        worth = [one for one in found if one.efficiency >= ENOUGH]
        return next(reversed(worth or found), None)

    @property
    def ideal(self) -> float:
        """Samples per second of one worker that only computes gradients."""
        return self.given.batch / self.given.gradient_seconds

    @property
    def found(self) -> str:
        """What the plan says, in words."""
        return "\n\n".join(self.words)

    words: Sequence[str] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        best = self.recommended
        return {
            "task": self.task,
            "directory": self.directory,
            "page": self.page,
            "found": self.found,
            "recommended": None if best is None else {"scheme": best.scheme, "workers": best.workers},
            "gradient_seconds": self.given.gradient_seconds,
            "vector_bytes": self.given.vector_bytes,
            "cells": [vars(one) for one in self.cells],
            "limits": [vars(one) for one in self.limits],
            "variations": [vars(one) for one in self.variations],
            "check": [{**vars(one), "error": one.error} for one in self.checked],
            "notes": list(self.notes),
        }

    def _repr_html_(self) -> str:
        """The page, which notebooks show in a frame."""
        text = Path(self.page).read_text(encoding="utf-8")
        return f'<iframe srcdoc="{escape(text)}" width="100%" height="700" style="border:0"></iframe>'


def fastest(cells: Sequence[PlanCell]) -> PlanCell | None:
    """That with the least time to the end; a lower bound of the time does not win against a time that was simulated
    unless nothing else is there."""
    reached = [one for one in cells if one.seconds is not None]
    simulated = [one for one in reached if one.known == "simulated"]
    return min(simulated or reached, key=lambda one: one.seconds or 0.0, default=None)
