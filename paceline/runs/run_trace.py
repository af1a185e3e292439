"""The timeline of a recorded launch: what its workers did when, from their times, the order of the server's calls, and
the events of the launch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from paceline.config.plan import Plan
from paceline.errors import DataError, UsageError
from paceline.runs import order_history, order_log, times_log
from paceline.runs.order_history import History
from paceline.runs.order_log import ROSE, MemberEvent, RecordKind
from paceline.runs.progress_log import ProgressReader
from paceline.runs.run_directory import RunDirectory
from paceline.runs.times_log import Entry, Spent, WorkerTimes
from paceline.runtime.timeline import RUN, Instant, Interval, Timeline

KINDS = {
    **{Spent.GRADIENT: "gradient", Spent.STOPPED: "gradient", Spent.CALL: "call", Spent.MEAN: "mean"},
    **{Spent.MEETING: "meeting", Spent.SLEEP: "sleep", Spent.WAIT: "wait", Spent.CHECKPOINT: "checkpoint"},
    **{Spent.RETURN: "return", Spent.EVALUATION: "hooks"},
}
NS = 1e9


class Life(NamedTuple):
    """One process life of a worker; times in seconds since the launch began."""

    number: int
    opened: float
    intervals: list[Interval]
    calls: list[tuple[int, float]]  # the method of each call, and when it ended


def timeline_of(run: RunDirectory, launch: int | None = None, since: float = 0.0, until: float = 0.0) -> Timeline:
    """The timeline of a launch (default: the last one), of all of it or from `since` to `until` seconds; UsageError or
    DataError say why there is none."""
    folder = _folder(run, launch)
    files = [times_log.read(path) for path in sorted(folder.glob(f"*{times_log.SUFFIX}"))]
    if not files:
        raise DataError(f"{folder} has the order of the run, but no times: an older version of paceline recorded it")
    history = order_history.read(folder)
    lives, notes = _lives(files)
    events = list(_events(ProgressReader(run.path).refresh(), int(folder.name)))
    if not events and any(len(own) > 1 for own in lives.values()):
        notes.append("progress.jsonl has no events of this launch: deaths are drawn where the last record of a life is")
    plan = history.plan
    made = Timeline(virtual=False, about={"run": run.name, "scheme": plan.scheme, "task": plan.task}, notes=notes)
    made.about |= {"workers": plan.workers, "launch": int(folder.name)}
    intervals, instants = _workers(lives, _deaths(events, plan))
    more, marks = _others(events, plan)
    instants += [*marks, *_updates(history, lives, notes)]
    intervals += more
    end = max([one.end for one in intervals] + [one.at for one in instants], default=0.0)
    _fill(made, intervals, instants, since, until or end)
    if run.is_locked():
        notes.append("the run goes on: this is its timeline so far")
    notes.append("servers and evaluator have marks only: the times of workers are recorded")
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
        intervals = list(_flat(role, one.entries, base, names))
        calls = [(entry.detail, (entry.end - base) / NS) for entry in one.entries if entry.kind == Spent.CALL]
        lives[head["rank"]].append(Life(head["life"], (head["opened"] - base) / NS, intervals, calls))
    if elsewhere:
        ranks = ", ".join(str(rank) for rank in sorted(elsewhere))
        notes.append(f"worker {ranks}: on another machine than the first worker; placed by the time of day of both")
    return lives, notes


def _flat(role: str, entries: Iterable[Entry], base: int, methods: list[str]) -> Iterator[Interval]:
    """Intervals that do not overlap: one that has others inside is cut into the parts around them."""
    done: list[Interval] = []
    for entry in entries:
        kind, start, end = KINDS[entry.kind], (entry.start - base) / NS, (entry.end - base) / NS
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
    return {Spent.STOPPED: "stopped", Spent.EVALUATION: "evaluation"}.get(entry.kind, "")


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


def _updates(history: History, lives: Mapping[int, list[Life]], notes: list[str]) -> list[Instant]:
    """An instant for each call that changed the centre: at its end in the worker that made it. The server's log has the
    order, the workers' files the times; the calls of one life are in the same order in both."""
    if not history.server or not any(history.server.values()):
        notes.append("the scheme has no server: its updates are not marked, its means are")
        return []
    waiting = {rank: iter(own) for rank, own in lives.items()}
    calls: dict[int, Iterator[tuple[int, float]]] = {rank: iter(()) for rank in lives}
    for rank in lives:
        calls[rank] = iter(next(waiting[rank]).calls)
    instants: list[Instant] = []
    unknown = 0
    for generation in sorted(history.server):
        for kind, values in history.server[generation]:
            if kind == RecordKind.MEMBER and values[0] == MemberEvent.LEFT and values[1] in waiting:
                following = next(waiting[values[1]], None)
                calls[values[1]] = iter(following.calls if following else ())
            elif kind == RecordKind.CALL and values[1] in calls:
                method, rank, flags = values[0], values[1], values[2]
                ended = next((end for made, end in calls[rank] if made == method), None)
                if flags & ROSE and ended is not None:
                    instants.append(Instant(f"worker:{rank}", "update", ended))
                unknown += bool(flags & ROSE) and ended is None
    if unknown:
        notes.append(f"{unknown:,} updates are not marked: their calls have no times, such as that of a killed worker")
    return instants
