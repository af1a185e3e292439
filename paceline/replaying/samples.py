"""The ledger of samples: which worker used which sample, and at which update of the centre it counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from paceline import role
from paceline.checkpoint import load
from paceline.directory import RunDirectory
from paceline.errors import DataError, UsageError
from paceline.feed import Stream
from paceline.journal import CALL, GRAD, MEAN, NOTE, POST, REFUSED, ROSE, returned
from paceline.plan import Plan
from paceline.replaying import history
from paceline.replaying.history import History, Life
from paceline.scheme import Scheme
from paceline.task import Task
from paceline.torch_task import TorchTask

Fate = Literal["used", "dropped", "lost", "rolled back"]


class Use(NamedTuple):
    """One gradient: whose, its mini-batch, and what became of it.

    `update` is the first change of the centre that its worker took part in after it. Lost are gradients that never
    came that far, because their worker died or the run ended; dropped ones came too late for the scheme.
    """

    rank: int
    batch: int
    fate: Fate
    update: int | None


@dataclass(frozen=True)
class Ledger:
    """All gradients of a run, and how its samples are drawn."""

    uses: list[Use]
    plan: Plan
    n: int
    batch: int
    feed: Any
    shuffle: bool

    def stream(self, rank: int) -> Stream:
        return Stream(self.n, self.batch, self.feed, self.shuffle, rank, self.plan.workers, self.plan.seed)

    def fates(self) -> dict[str, int]:
        """How many gradients had which fate."""
        counted = Counter(use.fate for use in self.uses)
        return {fate: counted[fate] for fate in ("used", "dropped", "lost", "rolled back")}

    def epochs(self) -> list[dict[str, int]]:
        """For each epoch (of a worker, where each has its own): how many samples counted once, more often, never."""
        common = self.feed == "slice"
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
                    length[key] = stream.n
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


def samples(run: str | Path, *, task: Task | None = None, scheme: Scheme | None = None) -> Ledger:
    """The ledger of a recorded run."""
    directory = RunDirectory.open(run)
    launches = history.read_all(directory.path)
    if not launches:
        raise DataError(f"{directory.path} has no order log, which the ledger of samples is read from")
    given = {name: value for name, value in (("task", task), ("scheme", scheme)) if value is not None}
    plan = launches[-1].plan
    known = role.task_of(plan, given)
    if not isinstance(known, TorchTask):
        raise UsageError(f"task {known.name!r} draws no samples that could be counted")
    kind = role.scheme_of(plan, given)
    uses: list[Use] = []
    for launch in launches:
        begun = launch.start
        if begun is not None:  # what came after the checkpoint that this launch went on from is void
            uses = [_void(use, begun.step) for use in uses]
        uses += _uses(launch, kind)
    return Ledger(uses, plan, known.train.length, known.batch, known.feed, known.shuffle)


def _void(use: Use, step: int) -> Use:
    return use._replace(fate="rolled back") if use.update is not None and use.update > step else use


def _uses(launch: History, scheme: Scheme) -> list[Use]:
    methods = [scheme.methods[name] for name in sorted(scheme.methods)]
    calls = _calls(launch)
    gathered: list[tuple[int, Use]] = []  # with the generation in which it was computed
    for life in launch.lives:
        gathered += _of_life(launch, life, calls, bool(methods))
    for generation in sorted({*launch.server, *(g for g, _ in gathered)} - {0}):
        step = load(returned(launch.path, generation)).step
        gathered = [(g, _void(use, step) if g < generation else use) for g, use in gathered]
    return [use for _, use in gathered]


def _calls(launch: History) -> dict[tuple[int, int, int], list[tuple[int, int]]]:
    """(rank, generation, life) -> the flags of its calls, each with the version of x before it."""
    found: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
    start = launch.start
    for generation, records in launch.server.items():
        version = load(returned(launch.path, generation)).step if generation else start.step if start else 0
        for position, record in enumerate(records):
            if record.kind == CALL:
                _, rank, flags, _ = record.values
                life = launch.living(rank, (generation, position))
                found[rank, generation, life].append((flags, version))
                version += flags & ROSE
    return found


def _of_life(
    launch: History, life: Life, calls: dict[tuple[int, int, int], list[tuple[int, int]]], served: bool
) -> Iterator[tuple[int, Use]]:
    rank, generation, number = life.rank, life.begun["generation"], life.begun["gradients"]
    version = life.begun["v"]
    performed = iter(calls.get((rank, generation, life.number), []))
    waiting: list[int] = []
    for record in life.records:
        if record.kind == GRAD:
            waiting.append(number)
            number += 1
        elif record.kind == POST and served:
            flags, before = next(performed, (None, 0))
            fate: Fate = "lost" if flags is None else "dropped" if flags & REFUSED else "used"
            yield from ((generation, Use(rank, n, fate, before + 1 if fate == "used" else None)) for n in waiting)
            waiting = []
        elif record.kind == MEAN and not served:
            version += 1
            yield from ((generation, Use(rank, n, "used", version)) for n in waiting)
            waiting = []
        elif record.kind == NOTE and "return" in record.values[0]:
            yield from ((generation, Use(rank, n, "lost", None)) for n in waiting)
            generation, waiting = record.values[0]["return"], []
            saved = load(returned(launch.path, generation))
            number, version = int(saved.tensors[f"person.{rank}"][1]), int(saved.tensors[f"worker.{rank}.v"])
            performed = iter(calls.get((rank, generation, life.number), []))
    alone = not served and launch.plan.workers == 1
    for n in waiting:
        version += alone
        yield generation, Use(rank, n, "used" if alone else "lost", version if alone else None)
