"""Whether a run's own account adds up, and whether replay gives what it has saved: for any run directory, however the
run ended."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from paceline.config import from_plan
from paceline.errors import DataError
from paceline.runs import checkpoint, order_history
from paceline.runs.order_log import END, NOTE
from paceline.runs.replay.gradient_fates import FATES, draws, saved_step, workers_of
from paceline.runs.replay.replay import replay
from paceline.runs.run_directory import RunDirectory
from paceline.scheme import Scheme
from paceline.task import Task


@dataclass(frozen=True)
class Account:
    """All gradients of a run. `drawn` = used + dropped + lost + rolled_back."""

    drawn: int
    used: int
    dropped: int
    lost: int
    rolled_back: int
    recorded: int  # gradients that led to what was saved, by the order log
    counted: int | None  # the same, as the run's result has it; None without a result

    def problems(self) -> list[str]:
        """What does not add up."""
        found = []
        if self.used + self.dropped + self.lost + self.rolled_back != self.drawn:
            found.append(f"the fates of gradients do not add up to the {self.drawn} that were drawn: {self}")
        if self.counted is not None and self.counted != self.recorded:
            found.append(f"the result counts {self.counted} gradients, the order log {self.recorded}")
        return found


def account(run: str | Path, *, scheme: Scheme | None = None) -> Account:
    """The account of a recorded run: done, interrupted, failed or killed."""
    directory = RunDirectory.open(run)
    launches = order_history.read_all(directory.path)
    if not launches:
        raise DataError(f"{directory.path} has no order log, which the account is read from")
    plan = launches[-1].plan
    kind = from_plan.scheme_of(plan, {} if scheme is None else {"scheme": scheme})
    found = draws(directory, launches, kind)
    fates = Counter(one.fate for one in found)
    used, dropped, lost, rolled_back = (fates[fate] for fate in FATES)
    result = directory.result() or {}
    return Account(
        drawn=len(found),
        used=used,
        dropped=dropped,
        lost=lost,
        rolled_back=rolled_back,
        recorded=_recorded(directory, launches, kind),
        counted=result.get("gradients"),
    )


def _recorded(directory: RunDirectory, launches: list[order_history.History], scheme: Scheme) -> int:
    """The gradients that led to what was saved: to the end of every worker, or to a checkpoint before it."""
    workers, _ = workers_of(launches, scheme)
    ended = all(any(life.ended for life in launches[-1].lives if life.rank == worker.rank) for worker in workers)
    if ended and _end_was_saved(launches[-1]) and not (directory.result() or {}).get("error"):
        return sum(worker.counted for worker in workers)
    step = saved_step(directory)
    path = None if step is None else checkpoint.find(directory.checkpoints, step)
    saved = None if path is None else checkpoint.load(path)
    return 0 if saved is None else sum(int(saved.tensors[f"person.{worker.rank}"][1]) for worker in workers)


def _end_was_saved(launch: order_history.History) -> bool:
    """Whether the chief wrote the last checkpoint; it may have been killed after all workers had ended."""
    for life in launch.lives:
        kinds = [record.kind for record in life.records]
        after = life.records[kinds.index(END) :] if life.rank == 0 and END in kinds else []
        if any(record.kind == NOTE and "checkpoint" in record.values[0] for record in after):
            return True
    return False


def audit(run: str | Path, *, task: Task | None = None, scheme: Scheme | None = None) -> list[str]:
    """What is wrong with a run directory: its account, or that replay gives other bits than it has saved. Empty if
    nothing is. Schemes without an order (hogwild), and runs that were not recorded, raise as `replay` does."""
    told = replay(run, task=task, scheme=scheme)
    found = [] if told.difference is None else [f"replay differs: {told.difference}"]
    return found + account(run, scheme=scheme).problems()
