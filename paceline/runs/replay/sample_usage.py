"""Sample usage of a recorded run: which worker used which sample, and for which update of the centre."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline.config import from_plan
from paceline.config.plan import Plan
from paceline.errors import UsageError
from paceline.runs import order_history
from paceline.runs.replay.accounting import FATES, Fate, draws
from paceline.runs.run_directory import RunDirectory
from paceline.sampling import Stream
from paceline.scheme import Scheme
from paceline.task import Task
from paceline.torch_task import SampledTask, StreamSamples


class Use(NamedTuple):
    """One gradient: its worker, its mini-batch and its fate.

    `update` is the first update of the centre that its worker contributed to afterwards. A gradient is lost if its
    worker died or the run ended before that, and dropped if it was too late for the scheme.
    """

    rank: int
    batch: int
    fate: Fate
    update: int | None


@dataclass(frozen=True)
class SampleUsage:
    """All gradients of a run, and how its samples were drawn."""

    uses: list[Use]
    plan: Plan
    task: SampledTask

    @property
    def n(self) -> int:
        """The number of samples."""
        return self.task.train.length or 0

    def stream(self, rank: int) -> Stream:
        return self.task.stream(rank, self.plan.workers, self.plan.seed)

    def fates(self) -> dict[str, int]:
        """The number of gradients of each fate."""
        counted = Counter(use.fate for use in self.uses)
        return {fate: counted[fate] for fate in FATES}

    def epochs(self) -> list[dict[str, int]]:
        """For each epoch (of each worker, if each has its own): the samples used once, more often, and never."""
        common = self.task.feed == "slice"
        counts: dict[tuple[int, int], Any] = defaultdict(lambda: np.zeros(self.n, np.int64))
        length: dict[tuple[int, int], int] = {}
        for rank in sorted({use.rank for use in self.uses}):
            stream = self.stream(rank)
            for use in self.uses:
                if use.rank != rank or use.fate != "used":
                    continue
                place = use.batch * stream.batch + stream.first + np.arange(stream.size)
                for epoch in np.unique(place // stream.n):
                    chosen = stream.indices(use.batch)[place // stream.n == epoch]
                    key = (-1 if common else rank, int(epoch))
                    np.add.at(counts[key], chosen, 1)
                    length[key] = stream.drawn_from
        rows = []
        for (rank, epoch), times in sorted(counts.items(), key=lambda item: (item[0][1], item[0][0])):
            seen = int((times > 0).sum())
            row = {"epoch": epoch, "once": int((times == 1).sum()), "more": int((times > 1).sum())}
            row["never"] = length[rank, epoch] - seen
            rows.append(row if common else {"worker": rank} | row)
        return rows

    def of(self, sample: int) -> list[Use]:
        """Every use of one sample."""
        if not 0 <= sample < self.n:
            raise UsageError(f"there is no sample {sample}; they are numbered from 0 to {self.n - 1}")
        streams = {rank: self.stream(rank) for rank in {use.rank for use in self.uses}}
        return [use for use in self.uses if sample in streams[use.rank].indices(use.batch)]


def samples(run: str | Path, *, task: Task | None = None, scheme: Scheme | None = None) -> SampleUsage:
    """The sample usage of a recorded run."""
    directory = RunDirectory.open(run)
    launches = order_history.recorded(directory)
    given = {name: value for name, value in (("task", task), ("scheme", scheme)) if value is not None}
    plan = launches[-1].plan
    known = from_plan.task_of(plan, given)
    if not isinstance(known, SampledTask) or isinstance(known.train, StreamSamples):
        raise UsageError(f"task {known.name!r} draws no samples that could be counted")
    kind = from_plan.scheme_of(plan, given)
    found = draws(directory, launches, kind)
    uses = [Use(one.rank, one.batch, one.fate or "lost", one.update) for one in found]
    return SampleUsage(uses, plan, known)
