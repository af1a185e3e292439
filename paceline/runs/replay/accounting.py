"""Checks of a run directory, however the run ended: its gradient counts add up, and replay gives the bits that it has
saved."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

from paceline.config import from_plan
from paceline.runs import checkpoint, order_history
from paceline.runs.accounts import claimed
from paceline.runs.order_log import RecordKind
from paceline.runs.replay.gradient_fates import FATES, draws, workers_of
from paceline.runs.replay.replay import replay
from paceline.runs.run_directory import RunDirectory
from paceline.scheme import Scheme
from paceline.task import Task


@dataclass(frozen=True)
class Account:
    """Gradient counts of a run. `drawn` = used + dropped + lost + rolled_back."""

    drawn: int
    used: int
    dropped: int
    lost: int
    rolled_back: int
    recorded: int  # gradients in the model that was saved, by the order log
    counted: int | None  # the same, by the run's result; None without a result

    def problems(self) -> list[str]:
        """The counts that do not add up."""
        found = []
        if self.used + self.dropped + self.lost + self.rolled_back != self.drawn:
            found.append(f"the fates of gradients do not add up to the {self.drawn} that were drawn: {self}")
        if self.counted is not None and self.counted != self.recorded:
            found.append(f"the result counts {self.counted} gradients, the order log {self.recorded}")
        return found


def account(run: str | Path, *, scheme: Scheme | None = None) -> Account:
    """The gradient counts of a recorded run: done, interrupted, failed or killed."""
    directory = RunDirectory.open(run)
    launches = order_history.recorded(directory)
    kind = from_plan.scheme_of(launches[-1].plan, {} if scheme is None else {"scheme": scheme})
    found = draws(directory, launches, kind)
    fates = Counter(one.fate for one in found)
    counts = {str(fate).replace(" ", "_"): fates[fate] for fate in FATES}
    counted = (directory.result() or {}).get("gradients")
    return Account(len(found), **counts, recorded=_recorded(directory, launches, kind), counted=counted)


def _recorded(directory: RunDirectory, launches: list[order_history.History], scheme: Scheme) -> int:
    """The gradients in the model that was saved: at the end of every worker, or at an earlier checkpoint."""
    workers, _ = workers_of(launches, scheme)
    ended = all(any(life.ended for life in launches[-1].lives if life.rank == worker.rank) for worker in workers)
    if ended and _end_was_saved(launches[-1]) and not (directory.result() or {}).get("error"):
        return sum(worker.counted for worker in workers)
    step, _ = claimed(directory)
    path = None if step is None else checkpoint.find(directory.checkpoints, step)
    saved = None if path is None else checkpoint.load(path)
    return 0 if saved is None else sum(int(saved.tensors[f"person.{worker.rank}"][1]) for worker in workers)


def _end_was_saved(launch: order_history.History) -> bool:
    """Whether the chief wrote the last checkpoint; it may have been killed after all workers had ended."""
    for life in launch.lives:
        after = dropwhile(lambda record: record.kind != RecordKind.END, life.records)
        if life.rank == 0 and any("checkpoint" in record.note for record in after):
            return True
    return False


def audit(run: str | Path, *, task: Task | None = None, scheme: Scheme | None = None) -> list[str]:
    """The faults of a run directory: counts that do not add up, and other bits in a replay. Schemes without an order
    (hogwild) and runs that were not recorded raise the errors of `replay`."""
    told = replay(run, task=task, scheme=scheme)
    found = [] if told.difference is None else [f"replay differs: {told.difference}"]
    return found + account(run, scheme=scheme).problems()
