"""The counts of a run. They come from the checkpoint that the run has saved; later updates count as lost, or as rolled
back once the run has resumed from that checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.result import Staleness, digest
from paceline.runs import checkpoint
from paceline.runs.checkpoint import Checkpoint
from paceline.runs.run_directory import RunDirectory
from paceline.runtime.staleness import StalenessLedger, staleness_of
from paceline.scheme import Scheme
from paceline.state import State


@dataclass(frozen=True)
class Standing:
    """The counts of a run at a checkpoint, named as in `Result`."""

    updates: int
    gradients: int
    samples: int
    dropped: int
    staleness: Staleness

    @classmethod
    def of(cls, saved: Checkpoint, scheme: Scheme, workers: int) -> Standing:
        counted = [saved.tensors[f"person.{rank}"].tolist() for rank in range(workers)]
        gradients, samples = (sum(int(person[k]) for person in counted) for k in (1, 2))
        direct = any(not method.atomic for method in scheme.methods.values())
        prefixes = ["ledger.0.", *(f"tally.{rank}." for rank in range(workers if direct else 0))]
        ledgers = [StalenessLedger(State.over(saved.under(one))) for one in prefixes] if scheme.methods else []
        dropped = int(ledgers[0].cells.refused) if ledgers else 0
        return cls(saved.step, gradients, samples, dropped, staleness_of(ledgers, saved.step, gradients))


@dataclass(frozen=True)
class Totals:
    """Counts over the earlier launches of a run."""

    restarts: int = 0
    rolled_back: int = 0

    @classmethod
    def of(cls, result: Mapping[str, Any] | None, first: Checkpoint | None) -> Totals:
        """`result`: of the last launch; `first`: the checkpoint that the next launch resumes from. A launch that was
        killed has left no result, so its updates after the checkpoint are not counted."""
        if result is None or "rolled_back_updates" not in result:
            numbers = {} if first is None else first.numbers
            return cls(int(numbers.get("restarts", 0)), int(numbers.get("rolled_back", 0)))
        reached = int(result["updates"]) + int(result.get("lost_updates") or 0)
        undone = max(reached - (0 if first is None else first.step), 0)
        return cls(int(result.get("restarts") or 0), int(result["rolled_back_updates"] or 0) + undone)


def claimed(directory: RunDirectory) -> tuple[int | None, str | None]:
    """The update and the digest of the model that a run says it has saved. A killed run says nothing: its newest
    checkpoint counts."""
    result = directory.result() or {}
    if "digest" in result:
        return int(result["updates"]), result["digest"]
    found = checkpoint.newest(directory.checkpoints, lambda _: None)
    return (None, None) if found is None else (found.step, digest(found.tensors["model"]))
