"""Timelines as files in the trace-event format, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

A role is a thread, what it does in the background another one. Times are microseconds since the start of the run; of a
simulation, of virtual time. An arrow leads from the role that ended a wait to the one that waited, and from a call to
the server. The file is read back too: `otherData` says of what run it is.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from paceline.errors import DataError, UsageError
from paceline.runs import atomic_files
from paceline.runtime.timeline import KINDS, RUN, Instant, Interval, Timeline

FORMAT = "paceline timeline 1"
MICRO, NS, NS_PER_MICRO = 1e6, 1e9, 1000
ARROW = 100  # ns before the end of an interval
PROCESS = 1
LARGEST = 512 * 2**20  # bytes of a file that is read


def for_file(path: str | Path) -> Timeline:
    """A timeline that will be written to this file, which is refused at once if it cannot be."""
    place = Path(path)
    if place.is_dir() or not os.access(place.parent, os.W_OK):
        why = "it is a folder" if place.is_dir() else f"{place.parent} is no folder that can be written to"
        raise UsageError(f"no trace can be written to {place}: {why}")
    return Timeline()


def write(timeline: Timeline, path: Path) -> None:
    """Write a trace; compressed if the file's name ends with .gz."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with atomic_files.failing_as(f"{path} could not be written"):
        try:
            with _opened(aside, "wt", path.suffix == ".gz") as file:
                file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(_about(timeline)))
                file.write(',\n"traceEvents": [\n')
                for number, event in enumerate(events(timeline)):
                    file.write((",\n" if number else "") + json.dumps(event))
                file.write("\n]}\n")
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)


def _opened(path: Path, mode: str, packed: bool) -> IO[Any]:
    if packed:
        return cast(IO[Any], gzip.open(path, mode, compresslevel=5))
    return path.open(mode)


def _about(timeline: Timeline) -> dict[str, Any]:
    told = {"format": FORMAT, "virtual": timeline.virtual, "end": timeline.end, "left_out": timeline.left_out}
    return told | {"notes": timeline.notes, "about": timeline.about}


def events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The events of a trace: names first, then all others by their time."""
    # a thread with the number of its process would be called the main thread
    threads = {role: 2 * number + 3 for number, role in enumerate([RUN, *timeline.roles])}
    about = timeline.about
    title = f"{about.get('scheme', 'run')} on {about['task']}" if about.get("task") else about.get("run", "run")
    yield _meta("process_name", 0, name=title + (" (virtual time)" if timeline.virtual else ""))
    beside = {one.role for one in timeline.intervals if one.background}
    for role, thread in threads.items():
        yield _meta("thread_name", thread, name=role)
        yield _meta("thread_sort_index", thread, sort_index=thread)
        if role in beside:
            yield _meta("thread_name", thread + 1, name=f"{role} in the background")
            yield _meta("thread_sort_index", thread + 1, sort_index=thread + 1)
    slices = [_slice(one, threads[one.role] + one.background) for one in timeline.intervals]
    marks = [_mark(one, threads[one.role]) for one in timeline.instants]
    following = _following(timeline)
    arrows = [
        event
        for number, one in enumerate(timeline.intervals)
        if one.by in threads and (one.kind != "wait" or number in following)  # after the last wait nothing comes
        for event in _arrow(number, one, following.get(number, one), threads[one.by], threads[one.role])
    ]
    # of two slices of one moment the longer one encloses the other
    yield from sorted([*slices, *marks, *arrows], key=lambda event: (event["ts"], -event.get("dur", 0.0)))


def _meta(what: str, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": PROCESS, "tid": thread, "ts": 0, "args": args}


def _slice(one: Interval, thread: int) -> dict[str, Any]:
    start, end = _ns(one.start), _ns(one.end)
    event = {"ph": "X", "name": f"{one.kind} {one.detail}".strip(), "cat": one.kind, "pid": PROCESS, "tid": thread}
    args: dict[str, Any] = {name: value for name, value in (("detail", one.detail), ("by", one.by)) if value}
    if one.cause is not None:
        args["cause"] = _ns(one.cause) / NS_PER_MICRO
    return event | {"ts": start / NS_PER_MICRO, "dur": (end - start) / NS_PER_MICRO} | ({"args": args} if args else {})


def _mark(one: Instant, thread: int) -> dict[str, Any]:
    event = {"ph": "i", "name": one.kind, "cat": "instant", "pid": PROCESS, "tid": thread}
    scope = "g" if one.kind in ("kill", "restart", "return") else "t"  # lines through all threads
    args = {"args": {"detail": one.detail}} if one.detail else {}
    return event | {"ts": _ns(one.at) / NS_PER_MICRO, "s": scope} | args


def _following(timeline: Timeline) -> dict[int, Interval]:
    """What each role did after each of its waits that has a cause."""
    after: dict[str, Interval] = {}
    found: dict[int, Interval] = {}
    for number in range(len(timeline.intervals) - 1, -1, -1):  # they are in the order of their starts
        one = timeline.intervals[number]
        if one.background:
            continue
        if one.kind == "wait" and one.by and one.role in after:
            found[number] = after[one.role]
        after[one.role] = one
    return found


def _arrow(number: int, one: Interval, then: Interval, source: int, target: int) -> Iterator[dict[str, Any]]:
    """From what the other role did to end a wait to what this one did after it; from a call to the server that performs
    it. Perfetto turns an arrow round whose source has begun after its target: a wait begins before most of what ends
    it. Both ends are inside an interval, not at its edge: a reader that rounds edges would find none there."""
    start, end = _ns(one.start), _ns(one.end)
    at = left = max(start + (end - start) // 2, end - ARROW)
    if then is not one:
        at = min((_ns(then.start) + _ns(then.end)) // 2, _ns(then.start) + ARROW)
    if one.cause is not None:
        left = min(_ns(one.cause), at)
    name = "ends the wait" if one.kind == "wait" else "is performed"
    for kind, thread, when in (("s", source, left), ("f", target, at)):
        event = {"ph": kind, "name": name, "cat": one.kind, "id": number, "pid": PROCESS, "tid": thread}
        yield event | {"ts": when / NS_PER_MICRO} | ({"bp": "e"} if kind == "f" else {})


def _ns(seconds: float) -> int:
    """Edges are whole nanoseconds: what is computed of them is exact, and they are written with three decimals."""
    return round(seconds * NS)


def read(path: Path) -> Timeline:
    """The timeline of a file that `write` has written."""
    try:
        if path.stat().st_size > LARGEST:
            raise DataError(f"{path} has more than {LARGEST >> 20} MB: a trace that large is not read")
        with _opened(path, "rt", path.suffix == ".gz") as file:
            told = json.load(file)
        about = told["otherData"]
        if about["format"] != FORMAT:
            raise DataError(f"{path} is a trace of {about['format']!r}; this version of paceline reads {FORMAT!r}")
        timeline = Timeline(virtual=about["virtual"], about=about["about"], notes=about["notes"])
        timeline.left_out = int(about["left_out"])
        _fill(timeline, told["traceEvents"])
        timeline.finish(float(about["end"]))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {atomic_files.cause(error)}") from error
    except (ValueError, KeyError, TypeError, EOFError, RecursionError) as error:
        raise DataError(f"{path} is no trace that paceline wrote: {error!r}") from error
    return timeline


def _fill(timeline: Timeline, found: list[dict[str, Any]]) -> None:
    threads = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    for event in found:
        args, at = event.get("args", {}), event["ts"] / MICRO
        if event["ph"] == "X":
            role, beside, _ = threads[event["tid"]].partition(" in the background")
            if event["cat"] not in KINDS:
                raise ValueError(f"an interval of kind {event['cat']!r}")
            end, detail = at + event["dur"] / MICRO, args.get("detail", "")
            cause = args["cause"] / MICRO if "cause" in args else None
            found_one = Interval(role, event["cat"], at, end, detail, args.get("by", ""), bool(beside), cause)
            timeline.intervals.append(found_one)
        elif event["ph"] == "i":
            timeline.instants.append(Instant(threads[event["tid"]], event["name"], at, args.get("detail", "")))
