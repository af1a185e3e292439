"""When the calls of an order log were made: the server's log has their order, the workers' files have the times.

A server's row of a timeline, and who ended which wait, follow from both. Nothing of it is measured at the server.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from paceline.runs.order_history import MEETINGS, History, WorkerLife
from paceline.runs.order_log import ROSE, MemberEvent, RecordKind
from paceline.runtime.timeline import Interval

LEADER = "server:0"  # decides the order; other servers perform the same calls on their parts of the vector
Span = tuple[float, float]
Waits = dict[tuple[int, float, float], str]  # (rank, start, end) of a wait -> the role that ended it


class TimedOperation(NamedTuple):
    """A call, a mean or a meeting of a worker, and its last wait for others; in seconds since the launch began."""

    start: float
    end: float
    wait: Span | None
    method: int = 0

    @property
    def since(self) -> float:
        """From when on it can have been performed."""
        return self.start if self.wait is None else self.wait[1]


class Life(NamedTuple):
    """One process life of a worker; times in seconds since the launch began."""

    number: int
    opened: float
    intervals: list[Interval]
    calls: list[TimedOperation]
    meetings: list[TimedOperation]  # means too


class ServedCall(NamedTuple):
    """A call of the server's order. `timed`: None if the worker that made it has no time of it."""

    rank: int
    method: int
    rose: bool
    timed: TimedOperation | None


def in_order(history: History, lives: Mapping[int, list[Life]]) -> dict[int, dict[int, ServedCall]]:
    """The calls of the server, by generation and position. Those of one life are in the same order in the worker's
    file, where calls that only read are between them."""
    coming = {rank: iter(own) for rank, own in lives.items()}
    calls: dict[int, Iterator[TimedOperation]] = {}
    for rank in lives:
        calls[rank] = iter(next(coming[rank]).calls)
    found: dict[int, dict[int, ServedCall]] = defaultdict(dict)
    for generation in sorted(history.server):
        for position, (kind, values) in enumerate(history.server[generation]):
            if kind == RecordKind.MEMBER and values[0] == MemberEvent.LEFT and values[1] in coming:
                following = next(coming[values[1]], None)
                calls[values[1]] = iter(following.calls if following else ())
            elif kind == RecordKind.CALL and values[1] in calls:
                method, rank, flags = values[0], values[1], values[2]
                timed = next((one for one in calls[rank] if one.method == method), None)
                found[generation][position] = ServedCall(rank, method, bool(flags & ROSE), timed)
    return found


def served(calls: Mapping[int, Mapping[int, ServedCall]], methods: Sequence[str]) -> Iterator[Interval]:
    """The row of the server: each call where it can have been performed. It was performed between the start and the end
    that its worker noted, after the calls before it and before those after it in the order."""
    timed = [
        (one, one.timed)
        for generation in sorted(calls)
        for _, one in sorted(calls[generation].items())
        if one.timed is not None
    ]
    latest = [own.end for _, own in timed]
    alike = [0] * len(timed)  # how many of those that follow must be performed until the same moment
    for at in range(len(timed) - 2, -1, -1):
        if latest[at] >= latest[at + 1]:
            latest[at], alike[at] = latest[at + 1], alike[at + 1] + 1
    before = 0.0
    for (one, own), end, others in zip(timed, latest, alike, strict=True):
        start = max(own.since, before)
        if start < end:  # clocks of two machines may be apart by more than a call takes
            before, worker = start + (end - start) / (others + 1), f"worker:{one.rank}"
            yield Interval(LEADER, "call", start, before, f"{methods[one.method]} of {worker}", worker)


def ended_waits(history: History, lives: Mapping[int, list[Life]], calls: dict[int, dict[int, ServedCall]]) -> Waits:
    """Who ended the waits within calls and means."""
    found: Waits = {}
    for generation, own in calls.items():
        for position, one in own.items():
            if one.timed is not None and one.timed.wait is not None:
                _note(found, one.rank, one.timed.wait, _opener(calls[generation], position, one.rank, one.timed.wait))
    known = {(life.rank, life.number): life for life in history.lives}
    arrivals = _arrivals(known, lives)
    for rank, several in lives.items():
        for life in several:
            recorded = known.get((rank, life.number))
            if recorded is None:
                continue
            for generation, position, timed in _reads(recorded, life):
                if timed.wait is not None and generation in calls:
                    _note(found, rank, timed.wait, _opener(calls[generation], position, rank, timed.wait))
            numbers = (record.values[0] for record in recorded.records if record.kind in MEETINGS)
            for number, timed in zip(numbers, life.meetings, strict=False):
                if timed.wait is not None:
                    present = history.decided.get((rank, number)) or dict.fromkeys(lives, number)
                    _note(found, rank, timed.wait, _last(arrivals, present, rank, timed.wait))
    return found


def _note(found: Waits, rank: int, wait: Span, by: int | None) -> None:
    if by is not None:
        found[rank, wait[0], wait[1]] = f"worker:{by}"


def _opener(calls: Mapping[int, ServedCall], position: int, rank: int, wait: Span) -> int | None:
    """The worker whose call made a guard true: of the calls before this position that can have been performed during
    the wait, the last one that changed x, or else the last one."""
    last: int | None = None
    for at in range(position - 1, -1, -1):
        one = calls.get(at)
        if one is None or one.timed is None or one.rank == rank or one.timed.since >= wait[1]:
            continue
        if one.timed.end <= wait[0]:
            break
        if one.rose:
            return one.rank
        last = one.rank if last is None else last
    return last


def _reads(recorded: WorkerLife, life: Life) -> Iterator[tuple[int, int, TimedOperation]]:
    """Calls that only read: the generation and the position of the server at which each was performed."""
    generation = recorded.begun["generation"]
    calls = iter(life.calls)
    for record in recorded.records:
        generation = record.note.get("return", generation)
        if record.kind == RecordKind.READ:
            timed = next((one for one in calls if one.method == record.values[0]), None)
            if timed is not None:
                yield generation, record.values[1], timed


def _arrivals(
    known: Mapping[tuple[int, int], WorkerLife], lives: Mapping[int, list[Life]]
) -> dict[tuple[int, int], float]:
    """When each worker came to its mean or meeting of each number."""
    found: dict[tuple[int, int], float] = {}
    for rank, several in lives.items():
        for life in several:
            if (recorded := known.get((rank, life.number))) is not None:
                numbers = (record.values[0] for record in recorded.records if record.kind in MEETINGS)
                found |= {(rank, number): one.start for number, one in zip(numbers, life.meetings, strict=False)}
    return found


def _last(arrivals: Mapping[tuple[int, int], float], present: Mapping[int, int], rank: int, wait: Span) -> int | None:
    """The member that came last, if it came during the wait."""
    came = [(arrivals[member], member[0]) for member in present.items() if member in arrivals]
    at, last = max(came, default=(0.0, rank))
    return last if last != rank and wait[0] <= at < wait[1] else None
