"""One account of a run: all numbers of what it has saved come from the checkpoint that it has saved, and what was made
beyond it is counted as lost, or as rolled back once the run has gone on from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.result import Staleness
from paceline.runs.checkpoint import Checkpoint
from paceline.runtime.staleness import StalenessLedger
from paceline.scheme import Scheme
from paceline.state import State


@dataclass(frozen=True)
class Standing:
    """How far a run had come when a checkpoint was put together."""

    updates: int
    gradients: int
    samples: int
    dropped: int
    staleness: Staleness

    @classmethod
    def of(cls, saved: Checkpoint, scheme: Scheme, workers: int) -> Standing:
        counted = [saved.tensors[f"person.{rank}"].tolist() for rank in range(workers)]
        gradients, samples = (sum(int(person[k]) for person in counted) for k in (1, 2))
        if not scheme.methods:
            stale = Staleness(histogram={0: gradients} if gradients else {})
            return cls(saved.step, gradients, samples, 0, stale)
        direct = any(not method.atomic for method in scheme.methods.values())
        prefixes = ["ledger.0.", *(f"tally.{rank}." for rank in range(workers if direct else 0))]
        ledgers = [StalenessLedger(State.over(_under(saved.tensors, prefix))) for prefix in prefixes]
        dropped = int(ledgers[0].cells.refused)
        return cls(saved.step, gradients, samples, dropped, staleness_of(ledgers, saved.step))


@dataclass(frozen=True)
class Totals:
    """What earlier launches of a run have added up to."""

    restarts: int = 0
    rolled_back: int = 0

    @classmethod
    def of(cls, result: Mapping[str, Any] | None, first: Checkpoint | None) -> Totals:
        """`result`: how the last launch ended; `first`: the checkpoint that the next one goes on from. A launch that
        was killed has left no result: what it had made after that checkpoint nobody knows."""
        if result is None or "rolled_back_updates" not in result:
            numbers = {} if first is None else first.numbers
            return cls(int(numbers.get("restarts", 0)), int(numbers.get("rolled_back", 0)))
        reached = int(result["updates"]) + int(result.get("lost_updates") or 0)
        void = max(reached - (0 if first is None else first.step), 0)
        return cls(int(result.get("restarts") or 0), int(result["rolled_back_updates"] or 0) + void)


def staleness_of(ledgers: Sequence[StalenessLedger], updates: int) -> Staleness:
    """What the server, or the workers that write into its vector themselves, have counted."""
    histogram: dict[int, int] = {}
    for ledger in ledgers:
        for staleness, number in ledger.histogram().items():
            histogram[staleness] = histogram.get(staleness, 0) + number
    admitted = sum(ledger.cells.admitted for ledger in ledgers)
    total = sum(ledger.cells.total for ledger in ledgers)
    return Staleness(
        mean=total / admitted if admitted else 0.0,
        max=max(ledger.cells.largest for ledger in ledgers),
        histogram=dict(sorted(histogram.items())),
        outstanding=ledgers[0].outstanding(updates) if len(ledgers) == 1 else 0,
    )


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}
