"""What the order logs of a launch say, put together: who lived when, and what the server did."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline import durable, file_sums, journal
from paceline.checkpoint import Checkpoint, load
from paceline.errors import DataError, UsageError
from paceline.journal import ABOUT, DECIDED, END, MEAN, NOTE, START, Log, Record
from paceline.plan import Plan
from paceline.transports.lane import JOINED


@dataclass
class Life:
    """What one worker did between its start and its end or death."""

    rank: int
    number: int
    begun: dict[str, Any]  # its first note: step, gradients, position of the server, …
    records: list[Record]
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
    server: dict[int, list[Record]]  # generation -> what the server did
    lives: list[Life]
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

    def abandoned(self, life: Life, generation: int, version: int) -> bool:
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
    return [read(at) for at in journal.launches(directory)]


def read(at: Path) -> History:
    """All logs of a launch."""
    try:
        about = durable.read_json(at / ABOUT)
    except DataError as error:
        raise DataError(f"{at}: this launch was not recorded, or what it was is lost: {error}") from error
    if about.get("format") != journal.FORMAT:
        raise DataError(
            f"{at / ABOUT} is of format {about.get('format')!r}; this version of paceline reads {journal.FORMAT}"
        )
    for key, kind in (("plan", dict), ("resumed", bool), ("versions", dict), ("unnamed", list), ("feeding", list)):
        if not isinstance(about.get(key), kind):
            raise DataError(f"{at / ABOUT} is not what was written: it has no {key}")
    try:
        plan = Plan.from_dict(about["plan"])
    except UsageError as error:
        raise DataError(f"{at / ABOUT} is not what was written: {error}") from error
    logs = {path.name: journal.read(path) for path in sorted(at.glob("*.log")) if not journal.unused(path)}
    server, cut = _server([logs[name] for name in sorted(logs, key=_number) if name.startswith("server-")])
    history = History(at, plan, about, server, [], cut=cut)
    for name in sorted(logs, key=_number):
        if name.startswith("worker-"):
            _add_life(history, logs[name])
    history.torn = {
        pair for present in history.decided.values() for pair in present.items() if history.decided[pair] != present
    }
    history.unseen = _unseen(history.lives)
    # a worker that never joined has no log, and the server has performed no call of it
    called = {one.values[1] for records in server.values() for one in records if one.kind == journal.CALL}
    missing = called - {life.rank for life in history.lives}
    if missing:
        raise DataError(f"the order log of worker {min(missing)} is missing in {at}")
    return history


def _unseen(lives: list[Life]) -> set[tuple[int, int, int]]:
    """A mean is logged before other workers can see it. If a later life of the worker uses its number again, the worker
    died in between, and what it brought was in no mean."""
    last: dict[tuple[int, int], int] = {}  # (rank, number) -> the last life that used it
    brought = [
        (life.rank, life.number, record.values[0]) for life in lives for record in life.records if record.kind == MEAN
    ]
    for rank, life, number in brought:
        last[rank, number] = max(life, last.get((rank, number), 0))
    return {(rank, life, number) for rank, life, number in brought if life < last[rank, number]}


def _row(record: Record) -> str:
    match record.kind:
        case journal.CALL:
            method, rank, flags, _ = record.values
            return f"call {method} of worker:{rank}" + (", dropped" if flags & journal.REFUSED else "")
        case journal.TELL:
            return f"worker:{record.values[1]} told to look"
        case journal.MEMBER:
            return f"worker:{record.values[1]} {'came' if record.values[0] == JOINED else 'went'}"
        case journal.SAVE:
            return "saved"
        case _:
            return f"set {record.values[0]}"


def _number(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", name))


def _server(logs: list[Log]) -> tuple[dict[int, list[Record]], bool]:
    generations: dict[int, list[Record]] = {0: []}
    current = 0
    for log in logs:
        current = max(current, log.header["generation"])
        for record in log.records:
            if record.kind == NOTE:
                current = record.values[0]["return"]
            else:
                generations.setdefault(current, []).append(record)
    return generations, any(log.cut for log in logs)


def _add_life(history: History, log: Log) -> None:
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
    history.lives.append(Life(header["rank"], header["life"], records[0].values[0], records[1:], log.cut))
