"""What the order logs of a launch say, put together: who lived when, and what the server did."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config.plan import Plan
from paceline.errors import DataError, UsageError
from paceline.runs import atomic_files, file_sums, order_log
from paceline.runs.checkpoint import Checkpoint, load
from paceline.runs.order_log import ABOUT, DECIDED, END, MEAN, NOTE, START, LogRecord, MemberEvent, OrderLog


@dataclass
class WorkerLife:
    """What one worker did between its start and its end or death."""

    rank: int
    number: int
    begun: dict[str, Any]  # its first note: step, gradients, position of the server, …
    records: list[LogRecord]
    cut: bool

    @property
    def ended(self) -> bool:
        """Whether it said goodbye."""
        return any(record.kind == END for record in self.records)

    @property
    def since(self) -> tuple[int, int]:
        """From when on calls of this rank are its own: generation, position."""
        return self.begun["generation"], self.begun["position"]


@dataclass
class History:
    """One launch."""

    path: Path
    plan: Plan
    about: dict[str, Any]
    server: dict[int, list[LogRecord]]  # generation -> what the server did
    lives: list[WorkerLife]
    decided: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)  # (rank, number) -> who took part
    torn: set[tuple[int, int]] = field(default_factory=set)  # those whose vectors were in more than one mean
    unseen: set[tuple[int, int, int]] = field(default_factory=set)  # (rank, life, number) of means that nobody saw
    checkpoints: dict[tuple[int, int], str] = field(default_factory=dict)  # (generation, step) -> digest of the model
    cut: bool = False

    @property
    def start(self) -> Checkpoint | None:
        """What the launch went on from; None for a fresh start."""
        return load(self.path / START) if self.about["resumed"] else None

    def living(self, rank: int, moment: tuple[int, int]) -> int:
        """Which life of a worker calls at this moment (generation, position): the last one that had begun."""
        begun = [life for life in self.lives if life.rank == rank and life.since <= moment]
        return max(begun, key=lambda life: life.since).number if begun else 0

    def abandoned(self, life: WorkerLife, generation: int, version: int) -> bool:
        """Whether an update that a worker made without a server was lost with it: all workers died, and the next life
        of this one began with cells from before it."""
        return any(
            later.rank == life.rank
            and later.number > life.number
            and later.begun["generation"] == generation
            and later.begun["v"] < version
            for later in self.lives
        )

    def rows(self) -> list[str]:
        """What the server did, a line each; of two runs the first line that differs is where their orders part."""
        return [_row(record) for generation in sorted(self.server) for record in self.server[generation]]

    def start_step(self) -> int:
        """The update at which it began."""
        begun = self.start
        return 0 if begun is None else begun.step


def read_all(directory: Path) -> list[History]:
    """Every launch of a run that was recorded, in their order. DataError for logs that are not what was written."""
    if found := file_sums.changed(directory, "order/"):
        raise DataError(f"run {directory}: {found[0]}")
    return [read(at) for at in order_log.launches(directory)]


def read(at: Path) -> History:
    """All logs of a launch."""
    try:
        about = atomic_files.read_json(at / ABOUT)
    except DataError as error:
        raise DataError(f"{at}: this launch was not recorded, or what it was is lost: {error}") from error
    if about.get("format") != order_log.FORMAT:
        raise DataError(
            f"{at / ABOUT} is of format {about.get('format')!r}; this version of paceline reads {order_log.FORMAT}"
        )
    for key, kind in (("plan", dict), ("resumed", bool), ("versions", dict), ("unnamed", list), ("feeding", list)):
        if not isinstance(about.get(key), kind):
            raise DataError(f"{at / ABOUT} is not what was written: it has no {key}")
    try:
        plan = Plan.from_dict(about["plan"])
    except UsageError as error:
        raise DataError(f"{at / ABOUT} is not what was written: {error}") from error
    logs = {path.name: order_log.read(path) for path in sorted(at.glob("*.log")) if not order_log.unused(path)}
    server, cut = _server([logs[name] for name in sorted(logs, key=_number) if name.startswith("server-")])
    history = History(at, plan, about, server, [], cut=cut)
    for name in sorted(logs, key=_number):
        if name.startswith("worker-"):
            _add_life(history, logs[name])
    if plan.scheme in _HAD_BARRIER:
        _drop_barrier(history)
    history.torn = {
        pair for present in history.decided.values() for pair in present.items() if history.decided[pair] != present
    }
    history.unseen = _unseen(history.lives)
    # a worker that never joined has no log, and the server has performed no call of it
    called = {one.values[1] for records in server.values() for one in records if one.kind == order_log.CALL}
    missing = called - {life.rank for life in history.lives}
    if missing:
        raise DataError(f"the order log of worker {min(missing)} is missing in {at}")
    return history


# `sync` once began with a barrier of its own: its methods were arrive, begin, begin_another, pull and push, numbered in
# this order; now they are pull and push. The two calls of the barrier change nothing that is compared.
_HAD_BARRIER = ("sync", "sync-rates", "sagn")
_BARRIER, _SHIFT = (0, 1), 3


def _drop_barrier(history: History) -> None:
    """Rewrite the records of a launch of that version as if it had run without the barrier."""
    calls = [one for records in history.server.values() for one in records if one.kind == order_log.CALL]
    if all(one.values[0] < _SHIFT for one in calls):
        return
    for records in history.server.values():
        for at, (kind, values) in enumerate(records):
            if kind == order_log.CALL and values[0] in _BARRIER:
                records[at] = LogRecord(order_log.TELL, values[:2])  # its place stays: later records count from it
            elif kind in (order_log.CALL, order_log.TELL):
                records[at] = LogRecord(kind, (values[0] - _SHIFT, *values[1:]))
    of_methods = (order_log.POST, order_log.ASK, order_log.READ)
    for life in history.lives:
        kept = [one for one in life.records if one.kind not in of_methods or one.values[0] not in _BARRIER]
        life.records = [
            LogRecord(kind, (values[0] - _SHIFT, *values[1:])) if kind in of_methods else LogRecord(kind, values)
            for kind, values in kept
        ]


def _unseen(lives: list[WorkerLife]) -> set[tuple[int, int, int]]:
    """A mean is logged before other workers can see it. If a later life of the worker uses its number again, the worker
    died in between, and what it brought was in no mean."""
    last: dict[tuple[int, int], int] = {}  # (rank, number) -> the last life that used it
    brought = [
        (life.rank, life.number, record.values[0]) for life in lives for record in life.records if record.kind == MEAN
    ]
    for rank, life, number in brought:
        last[rank, number] = max(life, last.get((rank, number), 0))
    return {(rank, life, number) for rank, life, number in brought if life < last[rank, number]}


def _row(record: LogRecord) -> str:
    match record.kind:
        case order_log.CALL:
            method, rank, flags, _ = record.values
            return f"call {method} of worker:{rank}" + (", dropped" if flags & order_log.REFUSED else "")
        case order_log.TELL:
            return f"worker:{record.values[1]} told to look"
        case order_log.MEMBER:
            return f"worker:{record.values[1]} {'came' if record.values[0] == MemberEvent.JOINED else 'went'}"
        case order_log.SAVE:
            return "saved"
        case _:
            return f"set {record.values[0]}"


def _number(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", name))


def _server(logs: list[OrderLog]) -> tuple[dict[int, list[LogRecord]], bool]:
    generations: dict[int, list[LogRecord]] = {0: []}
    current = 0
    for log in logs:
        current = max(current, log.header["generation"])
        for record in log.records:
            if record.kind == NOTE:
                current = record.values[0]["return"]
            else:
                generations.setdefault(current, []).append(record)
    return generations, any(log.cut for log in logs)


def _add_life(history: History, log: OrderLog) -> None:
    notes = [k for k, record in enumerate(log.records) if record.kind == NOTE and "position" in record.values[0]]
    if not notes:
        return  # it died before it had begun
    records = log.records[notes[0] :]  # before that it may have gone back with the others
    generation = records[0].values[0]["generation"]
    for record in records:
        told = record.values[0] if record.kind == NOTE else {}
        generation = told.get("return", generation)
        if record.kind == DECIDED:
            present = {int(rank): number for rank, number in record.values[0].items()}
            for rank, number in present.items():
                if rank == log.header["rank"]:
                    history.decided[rank, number] = present
                else:  # its own log says otherwise where the others' deaths came between
                    history.decided.setdefault((rank, number), present)
        elif "checkpoint" in told:
            history.checkpoints[told.get("generation", generation), told["checkpoint"]] = told["digest"]
    history.cut |= log.cut
    header = log.header
    history.lives.append(WorkerLife(header["rank"], header["life"], records[0].values[0], records[1:], log.cut))
