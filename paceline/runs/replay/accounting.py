"""The fate of every gradient of a recorded run: used, dropped, lost or rolled back, and nothing else; and checks of a
run directory, however the run ended: its gradient counts add up, and replay gives the bits that it has saved.

Each worker's logs are followed from the first launch to the last. A gradient waits until a call or a mean of its worker
includes it. A restarted worker keeps the gradients that its cells held at the end of its last step; a return to a
checkpoint restores those that the cells held at the checkpoint. Others that waited are lost. Updates that a return
undoes are rolled back.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path
from typing import Any, Literal, get_args

from paceline.config import from_plan
from paceline.runs import checkpoint, order_history
from paceline.runs.accounts import claimed
from paceline.runs.checkpoint import Checkpoint, load
from paceline.runs.order_history import History, WorkerLife
from paceline.runs.order_log import REFUSED, ROSE, LogRecord, RecordKind, returned
from paceline.runs.replay.replay import replay
from paceline.runs.run_directory import RunDirectory
from paceline.scheme import Scheme
from paceline.task import Task

Fate = Literal["used", "dropped", "lost", "rolled back"]
FATES: tuple[Fate, ...] = get_args(Fate)
Moment = tuple[int, int, int]  # a launch, a generation in it, and the position of the server


@dataclass(eq=False)
class Draw:
    """One gradient. One without a fate still waits."""

    rank: int
    batch: int
    fate: Fate | None = None
    update: int | None = None
    moment: Moment = (0, 0, 0)  # when its fate was decided


@dataclass
class _Launch:
    """The events of a launch that decide the fates of gradients."""

    number: int
    history: History
    calls: dict[tuple[int, int, int], list[tuple[int, int, Moment]]]  # (rank, generation, life): flags, version, when
    returns: dict[int, tuple[Checkpoint, Moment]]  # generation -> the checkpoint it began with, and when that was saved
    decided: set[tuple[int, int]]  # (generation, version) of means without some of the workers
    completed: dict[int, int]  # generation -> the last version after which some worker's log continues


@dataclass
class WorkerFates:
    """One worker's gradients so far."""

    rank: int
    draws: list[Draw] = field(default_factory=list)
    waiting: list[Draw] = field(default_factory=list)
    finished: int = 0  # the first `finished` waiting gradients are of steps that have ended
    number: int = 0  # of the next mini-batch
    counted: int = 0  # `number` at the end of the last step
    t: int = 0
    version: int = 0
    kept: dict[tuple[int, int], list[Draw]] = field(default_factory=dict)  # (t, number) -> gradients that waited then

    def boundary(self) -> None:
        self.finished, self.counted = len(self.waiting), self.number
        self.kept[self.t, self.number] = list(self.waiting)

    def draw(self) -> None:
        one = Draw(self.rank, self.number)
        self.draws.append(one)
        self.waiting.append(one)
        self.number += 1

    def decide(self, fate: Fate, update: int | None, moment: Moment) -> None:
        for one in self.waiting:
            one.fate, one.update, one.moment = fate, update, moment
        self.waiting, self.finished = [], 0

    def lose(self, keep: int = 0) -> None:
        """The waiting gradients are lost, except for the first `keep`."""
        kept, self.waiting = self.waiting[:keep], self.waiting[keep:]
        self.decide("lost", None, (0, 0, 0))
        self.waiting = kept

    def go_back(self, saved: Checkpoint, moment: Moment, *, served: bool) -> None:
        """Return to a checkpoint, of which the servers saved their part at that moment."""
        self.lose()
        undo(self.draws, saved.step, moment, served=served)
        t, number, _ = saved.tensors[f"person.{self.rank}"].tolist()
        self.t, self.number = int(t), int(number)
        self.version = int(saved.tensors[f"worker.{self.rank}.v"])
        # the cells held these when they were saved, and hold them again
        self.waiting = [one for one in self.kept.get((self.t, self.number), []) if one.fate != "used"]
        for one in self.waiting:
            one.fate = one.update = None
        self.boundary()


def undo(draws: list[Draw], step: int, moment: Moment, *, served: bool) -> None:
    """Roll back what came after a checkpoint."""
    for one in draws:
        after = one.moment > moment if served else (one.update or 0) > step
        if one.fate in ("used", "dropped") and after:
            one.fate = "rolled back"


def workers_of(launches: list[History], scheme: Scheme) -> tuple[list[WorkerFates], dict[int, Moment]]:
    """Every worker's gradients, and the moment at which the server saved its part of each checkpoint."""
    served = bool(scheme.methods)
    reads = [scheme.methods[name].reads for name in sorted(scheme.methods)]
    saves: dict[int, Moment] = {0: (0, 0, -1)}
    workers = [WorkerFates(rank) for rank in range(launches[0].plan.workers if launches else 0)]
    for one in workers:
        one.boundary()
    for number, history in enumerate(launches):
        start = history.start
        if start is not None:
            for one in workers:
                one.go_back(start, saves.get(start.step, (number, 0, -1)), served=served)
        launch = _read(number, history, saves, served=served)
        for one in workers:
            _follow(one, launch, scheme, reads)
    return workers, saves


def _read(number: int, history: History, saves: dict[int, Moment], *, served: bool) -> _Launch:
    """Also adds the checkpoints of the launch to `saves`."""
    launch = _Launch(number, history, defaultdict(list), {}, set(), defaultdict(int))
    for generation in history.generations():
        version = history.start_step()
        if generation:
            saved = load(returned(history.path, generation))
            version = saved.step
            launch.returns[generation] = saved, saves.get(version, (number, 0, -1))
        for position, record in enumerate(history.server.get(generation, [])):
            moment = number, generation, position
            if record.kind == RecordKind.CALL:
                _, rank, flags, _ = record.values
                caller = history.living(rank, (generation, position))
                launch.calls[rank, generation, caller].append((flags, version, moment))
                version += flags & ROSE
            elif record.kind == RecordKind.SAVE:
                saves[version] = moment
    if not served:
        for life in history.lives:
            _read_means(launch, life)
    return launch


def _read_means(launch: _Launch, life: WorkerLife) -> None:
    """The means without some of the workers, and those that were certainly completed."""
    generation, version, open_ = life.begun["generation"], life.begun["v"], False
    for record in life.records:
        told = record.note
        if record.kind == RecordKind.MEAN:
            version, open_ = version + 1, True
        elif record.kind == RecordKind.DECIDED:
            launch.decided.add((generation, version))
            launch.completed[generation] = max(launch.completed[generation], version)
        elif "return" in told:
            generation, open_ = told["return"], False
            version = int(launch.returns[generation][0].tensors[f"worker.{life.rank}.v"])
        elif "v" in told:
            version, open_ = told["v"], False
        elif open_ and record.kind in (RecordKind.GRAD, RecordKind.STEP):
            launch.completed[generation] = max(launch.completed[generation], version)
            open_ = False


def _follow(worker: WorkerFates, launch: _Launch, scheme: Scheme, reads: list[bool]) -> None:
    """Follow one worker through one launch."""
    served = bool(scheme.methods)
    generation = 0
    lives = sorted((life for life in launch.history.lives if life.rank == worker.rank), key=lambda one: one.number)

    def advance_to(wanted: int) -> None:
        nonlocal generation
        for later in sorted(g for g in launch.returns if generation < g <= wanted):
            worker.go_back(*launch.returns[later], served=served)
        generation = max(generation, wanted)

    for life in lives:
        advance_to(life.begun["generation"])
        _succeed(worker, life.begun, served=served)
        calls = iter(launch.calls.get((worker.rank, generation, life.number), []))
        for record in life.records:
            told = record.note
            if "return" in told:
                advance_to(told["return"])
                calls = iter(launch.calls.get((worker.rank, generation, life.number), []))
            elif "gradients" in told:  # it was absent, and has taken over the cells of another
                _succeed(worker, told, served=served)
            elif record.kind == RecordKind.POST and served:
                flags, before, moment = next(calls, (None, 0, (0, 0, 0)))
                if flags is not None and not reads[record.values[0]]:
                    dropped = bool(flags & REFUSED)
                    worker.decide("dropped" if dropped else "used", None if dropped else before + 1, moment)
                elif flags is None:  # sent and never performed
                    worker.lose()
            else:
                _heed(worker, record, scheme, launch, generation)
    advance_to(max(launch.returns, default=0))


def _succeed(worker: WorkerFates, told: dict[str, Any], *, served: bool) -> None:
    """A life begins with the cells that its note describes. In a run with a server they are those of its predecessor,
    with the gradients of the steps that had ended."""
    ended = told["t"] > worker.t  # it died between the end of a step and the record of it
    worker.lose(keep=(len(worker.waiting) if ended else worker.finished) if served else 0)
    for _ in range(worker.number, told["gradients"]):  # computed and not recorded: the worker died in between
        worker.draw()
        worker.waiting.pop().fate = "lost"
    worker.number, worker.t, worker.version = told["gradients"], told["t"], told["v"]
    worker.boundary()


def _heed(worker: WorkerFates, record: LogRecord, scheme: Scheme, launch: _Launch, generation: int) -> None:
    if record.kind == RecordKind.GRAD:
        worker.draw()
    elif record.kind == RecordKind.MEAN and not scheme.methods:
        worker.version += 1
        used = _took_part(worker, launch, generation, record.values[0])
        worker.decide("used" if used else "lost", worker.version if used else None, (0, 0, 0))
    elif record.kind == RecordKind.STEP:
        worker.t += 1
        if scheme.alone or scheme.decentralised:
            worker.version += 1
            worker.decide("used", worker.version, (0, 0, 0))
        worker.boundary()
    elif record.kind == RecordKind.END:
        worker.number = worker.counted  # a resumed worker computes those of an unfinished step again


def _took_part(worker: WorkerFates, launch: _Launch, generation: int, number: int) -> bool:
    """Whether a mean includes the vector of a worker that had arrived at it."""
    if (worker.rank, number) in launch.history.decided:
        return True
    if (generation, worker.version) in launch.decided:
        return False
    return worker.version <= launch.completed[generation]


def draws(directory: RunDirectory, launches: list[History], scheme: Scheme) -> list[Draw]:
    """All gradients of a run with their fates. What a run that is over has not saved is rolled back."""
    workers, saves = workers_of(launches, scheme)
    found = [one for worker in workers for one in worker.draws]
    step = None if directory.is_locked() else claimed(directory)[0]
    if step is not None:
        undo(found, step, saves.get(step, (0, 0, -1)), served=bool(scheme.methods))
    for one in found:
        if one.fate is None or (step is not None and one.fate == "used" and (one.update or 0) > step):
            one.fate, one.update = "lost", None  # the update that it waited for was never made
    return found


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


def _recorded(directory: RunDirectory, launches: list[History], scheme: Scheme) -> int:
    """The gradients in the model that was saved: at the end of every worker, or at an earlier checkpoint."""
    workers, _ = workers_of(launches, scheme)
    ended = all(any(life.ended for life in launches[-1].lives if life.rank == worker.rank) for worker in workers)
    if ended and _end_was_saved(launches[-1]) and not (directory.result() or {}).get("error"):
        return sum(worker.counted for worker in workers)
    step, _ = claimed(directory)
    path = None if step is None else checkpoint.find(directory.checkpoints, step)
    saved = None if path is None else load(path)
    return 0 if saved is None else sum(int(saved.tensors[f"person.{worker.rank}"][1]) for worker in workers)


def _end_was_saved(launch: History) -> bool:
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
