"""When the calls of an order log were made: the server's log has their order, the workers' files have the times.

A server's row of a timeline, and who ended which wait, follow from both. Nothing of it is measured at the server.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.runs.order_history import MEETINGS, History, WorkerLife
from paceline.runs.order_log import ROSE, RecordKind
from paceline.runtime.timeline import Interval

LEADER = "server:0"  # decides the order; other servers perform the same calls on their parts of the vector

EDGE = 1e-7  # seconds by which a moment is inside an interval


class Cause(NamedTuple):
    """What ended a wait: a role, and the moment at which it did."""

    role: str
    at: float | None = None


Waits = dict[tuple[int, float, float], Cause]  # (rank, start, end) of a wait


class Wait(NamedTuple):
    """A wait within an operation. `part`: for the others' parts of a mean; all had come then."""

    start: float
    end: float
    part: bool = False


class TimedOperation(NamedTuple):
    """A call, a mean or a meeting of a worker; in seconds since the launch began."""

    start: float
    end: float
    waits: tuple[Wait, ...] = ()
    detail: int = 0  # of a call: its method; of a mean or a meeting: its group, see `times_log`
    returns: int = 0  # how often the worker had returned to a checkpoint before it in this life
    started: Wait | None = None  # when the worker came to a mean that it waited for later

    @property
    def since(self) -> float:
        """From when on a call can have been performed."""
        return self.waits[-1].end if self.waits else self.start

    @property
    def coming(self) -> tuple[float, float]:
        """Between these moments the others could see that the worker had come to a mean."""
        if self.started is not None:
            return self.started.end, self.started.end
        return self.start, self.waits[0].start if self.waits else self.end

    @property
    def came(self) -> float:
        """A moment inside what the worker did when it came to a mean."""
        if self.started is not None:
            return _inside(self.started.start, self.started.end)
        return _inside(*self.coming)

    @property
    def decided(self) -> float:
        """A moment right after the worker had seen that all had come to a mean."""
        before = [one for one in self.waits if not one.part]
        if not before:
            return self.came
        after = next((one.start for one in self.waits if one.part), self.end)
        return min(before[-1].end + EDGE, (before[-1].end + after) / 2)

    @property
    def had_part(self) -> float:
        """By when the worker had made its own part of a mean."""
        return next((one.start for one in self.waits if one.part), self.end)

    @property
    def made_part(self) -> float:
        """A moment inside the making of that part."""
        before = [one.end for one in self.waits if not one.part]
        return _inside(before[-1] if before else self.start, self.had_part)


class Life(NamedTuple):
    """One process life of a worker; times in seconds since the launch began."""

    number: int
    opened: float
    intervals: list[Interval]
    calls: list[TimedOperation]
    meetings: list[TimedOperation]  # means too
    returns: int = 0  # to a checkpoint


class ServedCall(NamedTuple):
    """A call of the server's order. `timed`: None if the worker that made it has no time of it."""

    rank: int
    method: int
    rose: bool
    timed: TimedOperation | None


@dataclass
class _Matched:
    """The operations of one life as its order log has them, with their times. What a death, a stop or a return to a
    checkpoint has broken off is in the log and has no time."""

    posted: dict[tuple[int, int], deque[TimedOperation]]  # (generation, method) -> calls that a server performs
    reads: list[tuple[int, int, TimedOperation]] = field(default_factory=list)  # generation, the server's position
    meetings: list[tuple[int, TimedOperation]] = field(default_factory=list)  # the number that the worker gave it


def _matched(recorded: WorkerLife, life: Life) -> _Matched:
    """Between two returns to a checkpoint the records of a kind are in the order of their times. Returns before the
    first step are not in the log."""
    earlier = life.returns - sum("return" in record.note for record in recorded.records)
    calls, meetings = (
        defaultdict[tuple[int, int], deque[TimedOperation]](deque),
        defaultdict[int, deque[TimedOperation]](deque),
    )
    for one in life.calls:
        calls[one.returns - earlier, one.detail].append(one)
    for one in life.meetings:
        meetings[one.returns - earlier].append(one)
    found, part, generation = _Matched(defaultdict(deque)), 0, recorded.begun["generation"]
    for record in recorded.records:
        if "return" in record.note:
            part, generation = part + 1, record.note["return"]
        elif record.kind == RecordKind.POST and (waiting := calls[part, record.values[0]]):
            found.posted[generation, record.values[0]].append(waiting.popleft())
        elif record.kind == RecordKind.READ and (waiting := calls[part, record.values[0]]):
            found.reads.append((generation, record.values[1], waiting.popleft()))
        elif record.kind in MEETINGS and (waiting := meetings[part]):
            found.meetings.append((record.values[0], waiting.popleft()))
    return found


class CallTimes:
    """The operations of a launch: those of its order logs with the times of its workers."""

    def __init__(self, history: History, lives: Mapping[int, list[Life]]) -> None:
        self._history, plan = history, history.plan
        # workers take means in one memory: the lowest member of each decides who takes part
        self._one_node = plan.collective == "shared"
        # otherwise a process of the server performs calls, and its work is waited for too
        self._performs_itself = self._one_node and plan.servers <= 1
        known = {(life.rank, life.number): life for life in history.lives}
        self._matched = {
            (rank, life.number): _matched(known[rank, life.number], life)
            for rank, several in lives.items()
            for life in several
            if (rank, life.number) in known
        }
        self.calls = self._in_order()

    def _in_order(self) -> dict[int, dict[int, ServedCall]]:
        """The calls of the server, by generation and position."""
        begun = defaultdict[int, list[tuple[tuple[int, int], int]]](list)
        for life in self._history.lives:
            begun[life.rank].append((life.since, life.number))
        for several in begun.values():
            several.sort()
        found: dict[int, dict[int, ServedCall]] = defaultdict(dict)
        for generation in sorted(self._history.server):
            for position, (kind, values) in enumerate(self._history.server[generation]):
                if kind != RecordKind.CALL:
                    continue
                method, rank, flags = values[0], values[1], values[2]
                before = bisect_right(begun[rank], (generation, position), key=lambda one: one[0])
                number = begun[rank][before - 1][1] if before else 0
                matched = self._matched.get((rank, number))
                posted = matched.posted[generation, method] if matched is not None else None
                found[generation][position] = ServedCall(
                    rank, method, bool(flags & ROSE), posted.popleft() if posted else None
                )
        return found

    def served(self, methods: Sequence[str]) -> Iterator[Interval]:
        """The row of the server: each call where it can have been performed. It was performed between the start and the
        end that its worker noted, after the calls before it and before those after it in the order."""
        timed = [
            (one, one.timed)
            for generation in sorted(self.calls)
            for _, one in sorted(self.calls[generation].items())
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

    def ended_waits(self) -> Waits:
        """Who ended the waits within calls and means."""
        found: Waits = {}
        for generation, own in self.calls.items():
            for position, one in own.items():
                if one.timed is not None:
                    self._note_openers(found, generation, position, one.rank, one.timed)
        for (rank, _), matched in self._matched.items():
            for generation, position, timed in matched.reads:
                self._note_openers(found, generation, position, rank, timed)
        came = {(rank, number): timed for (rank, _), own in self._matched.items() for number, timed in own.meetings}
        for (rank, number), timed in came.items():
            present = self._history.decided.get((rank, number))
            if present is None:
                alike = (
                    member for member, other in came if other == number and came[member, number].detail == timed.detail
                )
                present = dict.fromkeys(alike, number)
            members = {member: came[member, its] for member, its in present.items() if (member, its) in came}
            for wait in timed.waits:
                _note(found, rank, wait, self._waited_for(members, min(present), rank, wait))
        return found

    def _note_openers(self, found: Waits, generation: int, position: int, rank: int, timed: TimedOperation) -> None:
        for wait in timed.waits:
            _note(found, rank, wait, _opener(self.calls.get(generation, {}), position, rank, timed.start, wait))
            if not self._performs_itself:
                found.setdefault((rank, wait.start, wait.end), Cause(LEADER))

    def _waited_for(self, members: Mapping[int, TimedOperation], lead: int, rank: int, wait: Wait) -> Cause | None:
        """Of the members of a mean, the one that ended a wait of this member: the one that came last, if it came during
        the wait; else the lowest, which had to wake up and to decide. Where the lowest itself lost its core before it
        waited, it waits for none that comes later, and the last one has come since it came. Of a wait for parts, the
        one that was ready last."""
        others = [(one, member) for member, one in members.items() if member != rank]
        if not others:
            return None
        if wait.part:
            _, last = max((one.had_part, member) for one, member in others)
            return _cause(last, members[last].made_part, wait)
        (came, seen), last = max((one.coming, member) for one, member in others)
        asked = members[rank].coming[0]
        if wait.start <= came < wait.end:
            return _cause(last, members[last].came, wait)
        if rank != lead and self._one_node:
            return _cause(lead, members[lead].decided, wait) if lead in members else None
        late = came < wait.end and (came > asked or seen > wait.start)
        return _cause(last, members[last].came, wait) if late else None


def _inside(start: float, end: float) -> float:
    """A moment in an interval, near its end."""
    return max((start + end) / 2, end - EDGE)


def _cause(rank: int, at: float, wait: Wait) -> Cause:
    """What a worker did ended a wait: not after the end of the wait, although the worker may have noted it later."""
    return Cause(f"worker:{rank}", min(at, wait.end))


def _note(found: Waits, rank: int, wait: Wait, by: Cause | None) -> None:
    if by is not None:
        found[rank, wait.start, wait.end] = by


def _opener(calls: Mapping[int, ServedCall], position: int, rank: int, asked: float, wait: Wait) -> Cause | None:
    """The call that made a guard true: of the calls before this position that can have been performed since the worker
    has asked, and before the wait was over, the last one that changed x, or else the last one."""
    last: Cause | None = None
    for at in range(position - 1, -1, -1):
        one = calls.get(at)
        if one is None or one.timed is None or one.rank == rank or one.timed.since >= wait.end:
            continue
        if one.timed.end <= asked:
            break
        cause = _cause(one.rank, _inside(one.timed.since, min(one.timed.end, wait.end)), wait)
        if one.rose:
            return cause
        last = cause if last is None else last
    return last
