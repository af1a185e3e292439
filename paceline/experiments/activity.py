"""Who computes and who waits: a short part of the timeline of a run, as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import DataError, UsageError
from paceline.runs.run_directory import RunDirectory
from paceline.runs.run_trace import timeline_of
from paceline.runtime.timeline import Interval, Timeline

WORKERS = 8  # that are shown
GRADIENTS = 30  # of each worker
COMPUTES, WAITS, MESSAGES, OTHER = "computes", "waits", "sends and receives", "other"
SHOWN = {
    **dict.fromkeys(("gradient", "data", "hooks", "update"), COMPUTES),
    **dict.fromkeys(("call", "mean", "meeting"), MESSAGES),
    "wait": WAITS,
}
Span = tuple[int, str, float, float]  # rank of a worker, what it did, from when to when


@dataclass(frozen=True)
class ActivityExcerpt:
    """What the first workers did from 0 to `end` seconds. `mean`: the mean length of a gradient."""

    end: float
    mean: float
    spans: Sequence[Span] = field(default_factory=tuple)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ActivityExcerpt:
        spans = [(int(rank), str(kind), float(start), float(end)) for rank, kind, start, end in data["spans"]]
        return cls(float(data["end"]), float(data["mean"]), spans)

    def until(self, end: float) -> list[Span]:
        """The spans up to a moment, the last ones cut."""
        return [(rank, kind, a, min(b, end)) for rank, kind, a, b in self.spans if a < end]

    def shares(self, end: float) -> dict[str, float]:
        """The parts of the workers' time up to a moment."""
        taken: dict[str, float] = {}
        spans, workers = self.until(end), {rank for rank, *_ in self.spans}
        for _, kind, a, b in spans:
            taken[kind] = taken.get(kind, 0.0) + b - a
        return {kind: seconds / (end * len(workers)) for kind, seconds in taken.items()} if end and workers else {}


def recorder(workers: int) -> Timeline:
    """What records the beginning of a simulation."""
    return Timeline(most=4 * GRADIENTS * workers)


def of_simulation(timeline: Timeline) -> ActivityExcerpt | None:
    """The beginning of a simulation: in virtual time it is like the rest."""
    return _activity(timeline.intervals, 0.0, timeline.end)


def of_run(directory: RunDirectory) -> ActivityExcerpt | None:
    """A part in the middle of a real run; None if it has no times."""
    try:
        intervals = timeline_of(directory).intervals
    except (DataError, UsageError):
        return None
    ends = sorted(one.end for one in intervals if one.kind == "gradient" and one.role == "worker:0")
    if not ends:
        return None
    first = max(0, (len(ends) - GRADIENTS) // 2)
    return _activity(intervals, ends[first], ends[min(first + GRADIENTS, len(ends) - 1)])


def _activity(intervals: Iterable[Interval], since: float, until: float) -> ActivityExcerpt | None:
    spans: list[Span] = []
    lengths: list[float] = []
    for one in intervals:
        kind, _, number = one.role.partition(":")
        if kind != "worker" or one.background or int(number) >= WORKERS or one.end <= since or one.start >= until:
            continue
        if one.kind == "gradient" and not one.detail:
            lengths.append(one.end - one.start)
        span = max(one.start, since) - since, min(one.end, until) - since
        spans.append((int(number), SHOWN.get(one.kind, OTHER), *span))
    mean = math.fsum(lengths) / len(lengths) if lengths else 0.0
    return ActivityExcerpt(until - since, mean, spans) if mean > 0 and until > since else None
