"""The order logs of one launch, combined: the process lives of its workers, and the actions of the server."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.config.plan import Plan
from paceline.errors import DataError, UsageError
from paceline.runs import atomic_files, file_sums, order_log
from paceline.runs.checkpoint import Checkpoint, load
from paceline.runs.order_log import ABOUT, START, LogRecord, MemberEvent, OrderLog, RecordKind
from paceline.runs.run_directory import RunDirectory

MEETINGS = (RecordKind.MEAN, RecordKind.MEET)
MESSAGES = (RecordKind.SENT, RecordKind.RECEIVED)


@dataclass
class WorkerLife:
    """The records of one process life of a worker: from its start to its end or death."""

    rank: int
    number: int
    begun: dict[str, Any]  # the first note: step, gradients, position of the server, …
    records: list[LogRecord]
    cut: bool

    @property
    def ended(self) -> bool:
        """Whether it ended in order."""
        return any(record.kind == RecordKind.END for record in self.records)

    @property
    def since(self) -> tuple[int, int]:
        """The moment (generation, position) since which calls of this rank are those of this life."""
        return self.begun["generation"], self.begun["position"]


@dataclass
class History:
    """One launch. (rank, number) names the contribution of a worker to its mean of that number."""

    path: Path
    plan: Plan
    about: dict[str, Any]
    server: dict[int, list[LogRecord]]  # generation -> actions of the server
    lives: list[WorkerLife]
    decided: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)  # (rank, number) -> participants
    torn: set[tuple[int, int]] = field(default_factory=set)  # (rank, number) of vectors that were in several means
    unseen: set[tuple[int, int, int]] = field(default_factory=set)  # (rank, life, number) that no other worker saw
    checkpoints: dict[tuple[int, int], str] = field(default_factory=dict)  # (generation, step) -> digest of the model
    # (generation, step) of a checkpoint of a decentralised run -> the workers whose models its model is the mean of
    averaged: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    cut: bool = False
    on_gpu: bool = False  # the server's vectors were in the memory of a GPU

    @property
    def start(self) -> Checkpoint | None:
        """The checkpoint that the launch resumed from; None for a new run."""
        return load(self.path / START) if self.about["resumed"] else None

    def living(self, rank: int, moment: tuple[int, int]) -> int:
        """The number of the life that makes a worker's calls at this moment: the last one that had begun."""
        begun = [life for life in self.lives if life.rank == rank and life.since <= moment]
        return max(begun, key=lambda life: life.since).number if begun else 0

    def abandoned(self, life: WorkerLife, generation: int, version: int) -> bool:
        """Whether an update of a worker in a run without a server was lost: all workers died, and its next life began
        with cells from before the update."""
        return any(
            later.rank == life.rank
            and later.number > life.number
            and later.begun["generation"] == generation
            and later.begun["v"] < version
            for later in self.lives
        )

    def rows(self) -> list[str]:
        """The actions of the server, a line each: the orders of two runs part at the first line that differs."""
        return [_row(record) for generation in sorted(self.server) for record in self.server[generation]]

    def start_step(self) -> int:
        """The update at which the launch began."""
        begun = self.start
        return 0 if begun is None else begun.step

    def generations(self) -> list[int]:
        """All generations of the launch: a run without a server has them only in its workers' logs."""
        returns = {record.note["return"] for life in self.lives for record in life.records if "return" in record.note}
        return sorted({*self.server, *returns, *(life.begun["generation"] for life in self.lives)})


def read_all(directory: Path) -> list[History]:
    """The recorded launches of a run, in order; DataError if a log has been changed."""
    if found := file_sums.changed(directory, "order/"):
        raise DataError(f"run {directory}: {found[0]}")
    return [read(at) for at in order_log.launches(directory)]


def recorded(directory: RunDirectory) -> list[History]:
    """The recorded launches of a run, in order; DataError if there are none."""
    if launches := read_all(directory.path):
        return launches
    why = "has no order log: it was run with --no-record, or by an older version"
    if Plan.from_dict(directory.plan()).script:
        why = "is the run of a script: only the script knows its data, so no order was recorded"
    raise DataError(f"{directory.path} {why}")


def read(at: Path) -> History:
    """The logs of one launch."""
    try:
        about = atomic_files.read_json(at / ABOUT)
    except DataError as error:
        raise DataError(f"{at}: this launch was not recorded, or its description is lost: {error}") from error
    if about.get("format") != order_log.FORMAT:
        found = about.get("format")
        raise DataError(f"{at / ABOUT} is of format {found!r}; this version of paceline reads {order_log.FORMAT}")
    for key, kind in (("plan", dict), ("resumed", bool), ("versions", dict), ("unnamed", list), ("feeding", list)):
        if not isinstance(about.get(key), kind):
            raise DataError(f"{at / ABOUT} is not what was written: it has no {key}")
    try:
        plan = Plan.from_dict(about["plan"])
    except UsageError as error:
        raise DataError(f"{at / ABOUT} is not what was written: {error}") from error
    logs = {path.name: order_log.read(path) for path in sorted(at.glob("*.log")) if not order_log.unused(path)}
    in_order = sorted(logs, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
    server, cut = _server([logs[name] for name in in_order if name.startswith("server-")])
    history = History(at, plan, about, server, [], cut=cut)
    history.on_gpu = any(log.header.get("gpu") for log in logs.values())
    for name in in_order:
        if name.startswith("worker-"):
            _add_life(history, logs[name])
    _drop_unfinished(history.lives)
    if plan.scheme in _HAD_BARRIER:
        _drop_barrier(history)
    history.torn = {
        pair for present in history.decided.values() for pair in present.items() if history.decided[pair] != present
    }
    history.unseen = _unseen(history.lives)
    # a worker that never joined has no log and made no call
    called = {one.values[1] for records in server.values() for one in records if one.kind == RecordKind.CALL}
    missing = called - {life.rank for life in history.lives}
    if missing:
        raise DataError(f"the order log of worker {min(missing)} is missing in {at}")
    return history


# `sync` once had a barrier of its own: its methods were arrive, begin, begin_another, pull and push, numbered in this
# order; now they are pull and push. The two calls of the barrier change nothing that replay compares.
_HAD_BARRIER = ("sync", "sync-rates", "sagn")
_BARRIER, _SHIFT = (0, 1), 3


def _drop_barrier(history: History) -> None:
    """Rewrite the records of a launch of that version without the barrier."""
    calls = [one for records in history.server.values() for one in records if one.kind == RecordKind.CALL]
    if all(one.values[0] < _SHIFT for one in calls):
        return
    for records in history.server.values():
        for at, (kind, values) in enumerate(records):
            if kind == RecordKind.CALL and values[0] in _BARRIER:
                records[at] = LogRecord(RecordKind.TELL, values[:2])  # keeps its position
            elif kind in (RecordKind.CALL, RecordKind.TELL):
                records[at] = LogRecord(kind, (values[0] - _SHIFT, *values[1:]))
    of_methods = (RecordKind.POST, RecordKind.ASK, RecordKind.READ)
    for life in history.lives:
        kept = [one for one in life.records if one.kind not in of_methods or one.values[0] not in _BARRIER]
        life.records = [
            LogRecord(kind, (values[0] - _SHIFT, *values[1:])) if kind in of_methods else LogRecord(kind, values)
            for kind, values in kept
        ]


def _drop_unfinished(lives: list[WorkerLife]) -> None:
    """Where workers send messages, a step is recorded before it is finished: others see its messages then. If the next
    life begins before the end of that step, the worker died in between, and the step was never finished."""
    for life, after in pairwise(lives):
        if life.rank != after.rank or not any(one.kind in MESSAGES for one in life.records):
            continue
        generation, t, last = life.begun["generation"], life.begun["t"], len(life.records)
        for k, record in enumerate(life.records):
            if "return" in record.note:
                generation, t = record.note["return"], record.note.get("t", 0)
            elif record.kind == RecordKind.STEP:
                t, last = t + 1, k
        if generation == after.begun["generation"] and t > after.begun["t"]:
            del life.records[last:]


def _unseen(lives: list[WorkerLife]) -> set[tuple[int, int, int]]:
    """A contribution is logged before other workers can see it. If a later life of the worker reuses its number, the
    worker died in between, and no mean includes the contribution."""
    last: dict[tuple[int, int], int] = {}  # (rank, number) -> the last life that used it
    logged = [(life.rank, life.number, one) for life in lives for one in life.records if one.kind in MEETINGS]
    brought = [(rank, life, record.values[0]) for rank, life, record in logged]
    for rank, life, number in brought:
        last[rank, number] = max(life, last.get((rank, number), 0))
    return {(rank, life, number) for rank, life, number in brought if life < last[rank, number]}


def _row(record: LogRecord) -> str:
    match record.kind:
        case RecordKind.CALL:
            method, rank, flags, _ = record.values
            return f"call {method} of worker:{rank}" + (", dropped" if flags & order_log.REFUSED else "")
        case RecordKind.TELL:
            return f"worker:{record.values[1]} told to look"
        case RecordKind.MEMBER:
            return f"worker:{record.values[1]} {'came' if record.values[0] == MemberEvent.JOINED else 'went'}"
        case RecordKind.SAVE:
            return "saved"
        case _:
            return f"set {record.values[0]}"


def _server(logs: list[OrderLog]) -> tuple[dict[int, list[LogRecord]], bool]:
    generations: dict[int, list[LogRecord]] = {0: []}
    current = 0
    for log in logs:
        current = max(current, log.header["generation"])
        for record in log.records:
            if record.kind == RecordKind.NOTE:
                current = record.note["return"]
            else:
                generations.setdefault(current, []).append(record)
    return generations, any(log.cut for log in logs)


def _add_life(history: History, log: OrderLog) -> None:
    begins = next((k for k, record in enumerate(log.records) if "position" in record.note), None)
    if begins is None:
        return  # it died before its first step
    records = log.records[begins:]  # earlier ones may be of a return to a checkpoint
    begun, header = records[0].note, log.header
    generation = begun["generation"]
    for record in records:
        told = record.note
        generation = told.get("return", generation)
        if record.kind == RecordKind.DECIDED:
            present = {int(rank): number for rank, number in record.values[0].items()}
            for rank, number in present.items():
                if rank == header["rank"]:
                    history.decided[rank, number] = present
                else:  # the worker's own log is right if deaths in between made the logs differ
                    history.decided.setdefault((rank, number), present)
        elif "checkpoint" in told:
            at = told.get("generation", generation), told["checkpoint"]
            history.checkpoints[at] = told["digest"]
            if "of" in told:
                history.averaged[at] = told["of"]
    history.cut |= log.cut
    history.lives.append(WorkerLife(header["rank"], header["life"], begun, records[1:], log.cut))
