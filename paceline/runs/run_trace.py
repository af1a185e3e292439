"""The timeline of a recorded launch: what its workers did when, from their times, the order of the server's calls, and
the events of the launch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.config.plan import Plan
from paceline.errors import DataError, UsageError
from paceline.runs import call_times, order_history, order_log, times_log
from paceline.runs.call_times import CallTimes, Life, TimedOperation, Wait, Waits
from paceline.runs.progress_log import EVALUATING, ProgressReader
from paceline.runs.run_directory import RunDirectory
from paceline.runs.times_log import PART, Entry, Spent, WorkerTimes
from paceline.runtime.timeline import RUN, Instant, Interval, Timeline

KINDS = {
    **{Spent.GRADIENT: "gradient", Spent.STOPPED: "gradient", Spent.CALL: "call", Spent.MEAN: "mean"},
    **{Spent.MEETING: "meeting", Spent.SLEEP: "sleep", Spent.WAIT: "wait", Spent.CHECKPOINT: "checkpoint"},
    **{Spent.RETURN: "return", Spent.EVALUATION: "hooks", Spent.STARTED: "mean"},
}
CALLS, MEETINGS = (Spent.CALL,), (Spent.MEAN, Spent.MEETING)
ENCLOSING = (*CALLS, *MEETINGS, Spent.CHECKPOINT, Spent.EVALUATION)  # what has waits inside
NS = 1e9


def timeline_of(run: RunDirectory, launch: int | None = None, since: float = 0.0, until: float = 0.0) -> Timeline:
    """The timeline of a launch (default: the last one), of all of it or from `since` to `until` seconds; UsageError or
    DataError say why there is none."""
    folder = _folder(run, launch)
    files = [times_log.read(path) for path in sorted(folder.glob(f"*{times_log.SUFFIX}"))]
    if not files:
        raise DataError(f"{folder} has the order of the run, but no times: an older version of paceline recorded it")
    history = order_history.read(folder)
    lives, notes = _lives(files)
    lines = ProgressReader(run.path).refresh()
    events = list(_events(lines, int(folder.name)))
    if not events and any(len(own) > 1 for own in lives.values()):
        notes.append("progress.jsonl has no events of this launch: deaths are drawn where the last record of a life is")
    plan = history.plan
    made = Timeline(virtual=False, about={"run": run.name, "scheme": plan.scheme, "task": plan.task}, notes=notes)
    made.about |= {"workers": plan.workers, "launch": int(folder.name)}
    intervals, instants = _workers(lives, _deaths(events, plan))
    more, marks = _others(events, plan)
    timed = CallTimes(history, lives)
    by = timed.ended_waits()
    intervals = [_ended(one, by) for one in intervals]
    instants += [*marks, *_updates(timed, notes)]
    performed = _served(timed, files, plan, notes)
    intervals += [*_around(more, performed), *performed, *_evaluations(lines, int(folder.name), notes)]
    end = max([one.end for one in intervals] + [one.at for one in instants], default=0.0)
    _fill(made, intervals, instants, since, until or end)
    if run.is_locked():
        notes.append("the run goes on: this is its timeline so far")
    return made


def _folder(run: RunDirectory, launch: int | None) -> Path:
    folders = {int(path.name): path for path in order_log.launches(run.path)}
    if not folders:
        order_history.recorded(run)  # says why
    number = max(folders) if launch is None else launch
    if number not in folders:
        known = ", ".join(str(one) for one in folders)
        raise UsageError(f"{run.name} has no launch {launch} that was recorded; it has {known}")
    return folders[number]


def _fill(made: Timeline, intervals: list[Interval], instants: list[Instant], since: float, until: float) -> None:
    """Put all that lies in a span of time into the timeline, in the order of their ends."""
    made.until = until
    entries: list[Interval | Instant] = [one for one in intervals if one.end > since]
    entries += [one for one in instants if one.at >= since]
    for one in sorted(entries, key=lambda one: one.end if isinstance(one, Interval) else one.at):
        if isinstance(one, Interval):
            made.add(one if one.start >= since else one._replace(start=since))
        else:
            made.mark(*one)
    made.finish(until)


def _lives(files: Iterable[WorkerTimes]) -> tuple[dict[int, list[Life]], list[str]]:
    """The lives of every worker, and what is to be said of their clocks. A machine has one clock; those of two machines
    are compared by the time of day."""
    known = sorted(files, key=lambda one: (one.header["rank"], one.header["life"]))
    first, lives, notes = known[0].header, defaultdict[int, list[Life]](list), []
    elsewhere = set()
    for one in known:
        head, shift = one.header, 0
        if head["boot"] != first["boot"]:
            shift = head["clock"] - first["clock"]
            elsewhere.add(head["rank"])
        base = first["began"] - shift
        role = f"worker:{head['rank']}"
        names = head["methods"]
        broken_off = _broken_off(one.entries, base)
        intervals = [
            part._replace(detail=broken_off.get((part.start, part.end), part.detail)) if part.kind == "wait" else part
            for part in _flat(role, one.entries, base, names)
        ]
        calls, meetings = list(_timed(one.entries, base, CALLS)), list(_timed(one.entries, base, MEETINGS))
        returns, opened = sum(entry.kind == Spent.RETURN for entry in one.entries), (head["opened"] - base) / NS
        lives[head["rank"]].append(Life(head["life"], opened, intervals, calls, meetings, returns))
    if elsewhere:
        ranks = ", ".join(str(rank) for rank in sorted(elsewhere))
        notes.append(f"worker {ranks}: on another machine than the first worker; placed by the time of day of both")
    return lives, notes


def _timed(entries: Iterable[Entry], base: int, kinds: tuple[Spent, ...]) -> Iterator[TimedOperation]:
    """Operations of these kinds, with the waits inside each."""
    waits: list[Wait] = []
    started: Wait | None = None
    returns = 0
    for entry in entries:
        start, end = (entry.start - base) / NS, (entry.end - base) / NS
        if entry.kind == Spent.WAIT:
            waits.append(Wait(start, end, entry.detail == PART))
        elif entry.kind == Spent.STARTED and kinds == MEETINGS:
            started = Wait(start, end)
        elif entry.kind == Spent.RETURN:
            started, returns = None, returns + 1
        elif entry.kind in ENCLOSING:
            if entry.kind in kinds:
                inside = tuple(one for one in waits if one.start >= start)
                yield TimedOperation(start, end, inside, entry.detail, returns, started)
                started = None
            waits.clear()


def _broken_off(entries: Iterable[Entry], base: int) -> dict[tuple[float, float], str]:
    """The waits that were ended by what ended the whole step: a return to a checkpoint, or the end of the run."""
    found: dict[tuple[float, float], str] = {}
    last: Entry | None = None
    for entry in entries:
        if entry.kind == Spent.WAIT:
            last = entry
        elif entry.kind == Spent.RETURN and last is not None:
            found[(last.start - base) / NS, (last.end - base) / NS] = "until the run returned to a checkpoint"
            last = None
        elif last is not None and (entry.start <= last.start or entry.kind not in (Spent.CHECKPOINT, Spent.EVALUATION)):
            last = None  # it was inside this one, or the step went on
    if last is not None:
        found[(last.start - base) / NS, (last.end - base) / NS] = "until the run ended"
    return found


def _ended(one: Interval, by: Waits) -> Interval:
    """A wait with the role that ended it."""
    if one.kind != "wait":
        return one
    cause = by.get((int(one.role.partition(":")[2]), one.start, one.end))
    return one if cause is None else one._replace(by=cause.role, cause=cause.at)


def _flat(role: str, entries: Iterable[Entry], base: int, methods: list[str]) -> Iterator[Interval]:
    """Intervals that do not overlap: one that has others inside is cut into the parts around them."""
    done: list[Interval] = []
    for entry in entries:
        kind, start, end = KINDS[entry.kind], (entry.start - base) / NS, (entry.end - base) / NS
        if entry.kind == Spent.STARTED and entry.detail:
            kind = "meeting"
        first = len(done)
        while first and done[first - 1].start >= start:
            first -= 1
        inside = done[first:]
        del done[first:]
        end = max([end, *(one.end for one in inside[-1:])])
        edges = [start, *(edge for one in inside for edge in (one.start, one.end)), end]
        parts = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a] or [(end, end)]
        detail = _detail(entry, methods)
        whole = [Interval(role, kind, a, b, detail) for a, b in parts]
        if kind == "gradient":  # counted once
            whole[:-1] = [one._replace(detail="goes on") for one in whole[:-1]]
        done += sorted([*inside, *whole], key=lambda one: one.start)
        if not inside and len(done) > 1000:  # nothing later can enclose what ended before this one began
            yield from done[:-1]
            del done[:-1]
    yield from done


def _detail(entry: Entry, methods: list[str]) -> str:
    if entry.kind == Spent.CALL:
        return methods[entry.detail] if entry.detail < len(methods) else ""
    if entry.kind == Spent.WAIT and entry.detail == PART:
        return "for the others' parts"
    told = {Spent.STOPPED: "stopped", Spent.EVALUATION: "evaluation", Spent.STARTED: "started"}
    return told.get(entry.kind, "")


def _events(lines: Iterable[Mapping[str, Any]], launch: int) -> Iterator[Mapping[str, Any]]:
    """The events of a launch in `progress.jsonl`."""
    current = 0
    for line in lines:
        current = line.get("launch", current)
        if current == launch and "event" in line and isinstance(line.get("seconds"), int | float):
            yield line


def _died(event: Mapping[str, Any]) -> bool:
    return event["event"] == "warn" and bool(event.get("role")) and "restarting it" in str(event.get("text"))


def _deaths(events: Iterable[Mapping[str, Any]], plan: Plan) -> dict[int, list[tuple[float, str]]]:
    """When each worker died, and how."""
    deaths = defaultdict[int, list[tuple[float, str]]](list)
    for event in filter(_died, events):
        for rank in _ranks(event["role"], plan):
            deaths[rank].append((float(event["seconds"]), str(event["text"])))
    return deaths


def _ranks(role: str, plan: Plan) -> range:
    """The workers in the process of a role; none of a server or an evaluator."""
    kind, _, number = role.partition(":")
    if kind not in ("chief", "worker"):
        return range(0)
    return range(int(number or 0), plan.workers, plan.hosts)


def _workers(
    lives: Mapping[int, list[Life]], deaths: Mapping[int, list[tuple[float, str]]]
) -> tuple[list[Interval], list[Instant]]:
    """What the workers did, their deaths and restarts."""
    intervals: list[Interval] = []
    instants: list[Instant] = []
    for rank, own in lives.items():
        role = f"worker:{rank}"
        for life in own:
            intervals += life.intervals
            first = life.intervals[0].start if life.intervals else life.opened
            if first > life.opened:
                intervals.append(Interval(role, "other", life.opened, first, "starting"))
        for life, after in pairwise(own):
            last = max(life.opened, life.intervals[-1].end if life.intervals else life.opened)
            known = [death for death in deaths.get(rank, ()) if last <= death[0] <= after.opened]
            at, text = known[0] if known else (last, "after its last record; the moment is not known")
            instants += [
                Instant(role, "kill", at, text),
                Instant(role, "restart", after.opened, f"life {after.number}"),
            ]
            intervals.append(Interval(role, "dead", at, after.opened))
    return intervals, instants


def _others(events: Iterable[Mapping[str, Any]], plan: Plan) -> tuple[list[Interval], list[Instant]]:
    """Deaths and restarts of servers and of the evaluator, and what happened to the run as a whole."""
    intervals: list[Interval] = []
    instants: list[Instant] = []
    since: dict[str, float] = {}
    for event in events:
        at, text, role, kind = float(event["seconds"]), str(event.get("text")), event.get("role") or "", event["event"]
        other = role and not _ranks(role, plan)
        if _died(event):
            if other:
                instants.append(Instant(role, "kill", at, text))
                since[role] = at
        elif kind == "restarted":
            if other:
                instants.append(Instant(role, "restart", at, text))
                intervals.append(Interval(role, "dead", since.pop(role, at), at))
        elif kind == "rolled back":
            instants.append(Instant(RUN, "return", at, text))
        elif kind in ("warn", "stop", "failed"):
            instants.append(Instant(RUN, "warning" if kind == "warn" else kind, at, text))
    return intervals, instants


def _updates(timed: CallTimes, notes: list[str]) -> list[Instant]:
    """An instant for each call that changed the centre: at its end in the worker that made it."""
    every = [one for own in timed.calls.values() for one in own.values()]
    if not every:
        notes.append("the scheme has no server: its updates are not marked, its means are")
        return []
    unknown = sum(one.rose and one.timed is None for one in every)
    if unknown:
        notes.append(f"{unknown:,} updates are not marked: their calls have no times, such as that of a killed worker")
    return [Instant(f"worker:{one.rank}", "update", one.timed.end) for one in every if one.rose and one.timed]


def _served(timed: CallTimes, files: list[WorkerTimes], plan: Plan, notes: list[str]) -> list[Interval]:
    """The row of the server."""
    found = list(timed.served(files[0].header["methods"]))
    if found:
        more = " (the first of several)" if plan.servers > 1 else ""
        notes.append(
            f"{call_times.LEADER}{more}: calls in their order, each drawn where it can have been performed by the "
            "times of the workers; on one node with one server the worker performs its call itself, under a lock"
        )
    return found


def _around(deaths: list[Interval], performed: list[Interval]) -> Iterator[Interval]:
    """The parts of a server's deaths in which no call was performed: workers go on performing theirs."""
    for one in deaths:
        start = one.start
        for call in performed if one.role == call_times.LEADER else ():
            if call.end > start and call.start < one.end:
                if call.start > start:
                    yield one._replace(start=start, end=call.start)
                start = call.end
        if start < one.end:
            yield one._replace(start=start)


def _evaluations(lines: Iterable[Mapping[str, Any]], launch: int, notes: list[str]) -> list[Interval]:
    """What the evaluator did, as far as the lines of `progress.jsonl` show it."""
    found: list[Interval] = []
    current, names, before = 0, list[str](), 0.0
    for line in lines:
        if "launch" in line:
            current, names, before = line["launch"], list(line.get("roles") or ()), 0.0
        names = line.get("names", names)
        at, states = line.get("seconds"), line.get("states", "")
        if current != launch or "event" in line or not isinstance(at, int | float) or len(states) != len(names):
            continue
        if "evaluator" in names and states[names.index("evaluator")] == EVALUATING:
            if found and found[-1].end == before:
                found[-1] = found[-1]._replace(end=float(at))
            else:
                found.append(Interval("evaluator", "hooks", before, float(at), "evaluation"))
        before = float(at)
    if found:
        notes.append(
            "the evaluator's times are those of progress.jsonl, a few lines per second: short ones are missing"
        )
    return found
