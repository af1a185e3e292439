"""Checks files in the trace-event format, as its specification has them, without knowing who wrote them."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

NEEDED = {
    "X": {"name", "ts", "dur", "pid", "tid"},
    "i": {"name", "ts", "pid", "tid", "s"},
    "s": {"name", "ts", "pid", "tid", "id"},
    "f": {"name", "ts", "pid", "tid", "id", "bp"},
    "M": {"name", "pid", "tid", "args"},
}
EDGE = 0.002  # microseconds by which rounding may move an edge


def checked(path: Path) -> list[dict[str, Any]]:
    """The events of a file, or an AssertionError that says what is wrong."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[dict[str, Any]] = json.loads(content, parse_constant=_refused)["traceEvents"]
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    last = -math.inf
    for event in events:
        assert NEEDED[event["ph"]] <= event.keys(), event
        if event["ph"] == "M":
            continue
        assert event["tid"] in named, event
        assert event["ts"] >= max(last, 0.0), event
        assert event.get("dur", 0.0) >= 0, event
        last = event["ts"]
    _check_nesting(events)
    _check_arrows(events)
    return events


def _refused(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def _slices(events: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["tid"]].append(event)
    return found


def _check_nesting(events: list[dict[str, Any]]) -> None:
    """A slice of a thread is inside another one, or outside of it."""
    for own in _slices(events).values():
        open_until: list[float] = []
        for event in own:
            begin, end = event["ts"], event["ts"] + event["dur"]
            while open_until and open_until[-1] <= begin + EDGE:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + EDGE, event
            open_until.append(end)


def _check_arrows(events: list[dict[str, Any]]) -> None:
    """Every arrow has one start and one end, and both are inside a slice; it leads forward in time, and what it comes
    from has not begun after what it leads to, or Perfetto would turn it round."""
    slices, ends = _slices(events), defaultdict[int, list[dict[str, Any]]](list)
    begun: dict[tuple[int, str], float] = {}
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"]].append(event)
            around = [one for one in slices[event["tid"]] if one["ts"] <= event["ts"] <= one["ts"] + one["dur"]]
            assert around or event["ph"] == "s", event  # a role whose death ended the wait does nothing then
            begun[event["id"], event["ph"]] = around[-1]["ts"] if around else -math.inf
    assert all([one["ph"] for one in pair] == ["s", "f"] for pair in ends.values())
    backward = [one for one in ends if begun[one, "s"] > begun[one, "f"] + EDGE]
    assert not backward, (len(backward), len(ends), ends[backward[0]])
