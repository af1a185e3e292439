"""The timeline of a simulated run: it agrees with what the run reports, and changes none of its bits."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.api.simulate import simulate
from paceline.config import discovery
from paceline.errors import DataError, RunError, UsageError
from paceline.report import chrome_trace
from paceline.result import Result
from paceline.runtime.timeline import Interval, Timeline
from tests.beds import trace_format
from tests.beds.short_windows import short

SCHEMES = sorted(discovery.schemes())
SLOW = {"workers": 4, "speeds": (1, 1, 1, 0.2)}


def traced(scheme: str, task: str = "toy", **settings: Any) -> tuple[Result, Timeline]:
    timeline = Timeline()
    quiet = {"watch": lambda _: None, "warn": lambda _: None}
    return simulate(task, scheme, trace=timeline, **(quiet | settings)), timeline


def check(timeline: Timeline) -> None:
    """What a role does in the foreground does not overlap, and is within the run."""
    last: dict[str, float] = {}
    for one in timeline.intervals:
        assert 0 <= one.start < one.end <= timeline.end
        if not one.background:
            assert one.start >= last.get(one.role, 0.0)
            last[one.role] = one.end
    assert all(0 <= one.at <= timeline.end for one in timeline.instants)
    assert all(sum(taken.values()) <= 1 + 1e-9 for taken in timeline.shares().values())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_counts_what_the_run_counts_and_changes_no_bit(scheme: str, tmp_path: Path) -> None:
    alone = discovery.scheme(scheme).alone
    settings = {"workers": 1 if alone else 4, "steps": 12, "network": "latency=0.1", "compute": "exponential:1.0"}
    settings |= short(scheme)
    quiet = {"watch": lambda _: None, "warn": lambda _: None}
    plain = simulate("toy", scheme, **settings, **quiet)
    result, timeline = traced(scheme, **settings)
    assert (result.digest, result.virtual_seconds) == (plain.digest, plain.virtual_seconds)
    check(timeline)
    assert timeline.end == result.virtual_seconds
    assert timeline.count("gradient") == result.gradients
    assert timeline.instants[-1][1::2] == ("update", str(result.updates))
    # from its first to its last moment a worker always does something
    for role, taken in timeline.shares().items():
        if role.startswith("worker"):
            ended = max(one.end for one in timeline.intervals if one.role == role)
            assert sum(taken.values()) == pytest.approx(ended / timeline.end)
    path = tmp_path / "trace.json"
    chrome_trace.write(timeline, path)
    events = trace_format.checked(path)
    assert sum(event["ph"] == "X" and event["name"] == "gradient" for event in events) == result.gradients


def test_a_straggler_is_seen_under_sync_and_not_under_async() -> None:
    _, together = traced("sync", steps=20, **SLOW)
    _, alone = traced("async", steps=40, **SLOW)
    shares = together.shares()
    assert [shares[f"worker:{rank}"].get("wait", 0.0) for rank in range(4)] == pytest.approx([0.8, 0.8, 0.8, 0.0])
    assert shares["worker:3"] == {"gradient": pytest.approx(1.0)}
    assert {one.by for one in together.intervals if one.kind == "wait"} == {"worker:3"}
    workers = {role: taken for role, taken in alone.shares().items() if role.startswith("worker")}
    assert workers == {f"worker:{rank}": {"gradient": pytest.approx(1.0)} for rank in range(4)}


def test_messages_and_waits_are_told_apart() -> None:
    _, timeline = traced("sync", workers=2, steps=1, speeds=(1, 0.5), network="latency=0.25")
    told = [(one.kind, one.start, one.end, one.detail) for one in timeline.intervals if one.role == "worker:0"]
    assert told == [
        ("call", 0.0, 0.5, "pull"),
        ("gradient", 0.5, 1.5, ""),
        ("call", 1.5, 2.0, "push"),
        ("call", 2.0, 2.25, "pull"),
        ("wait", 2.25, 2.75, "pull"),
    ]


FAULTS = [
    ("kill:1@time=3.5,back=4", {}),
    ("kill:server:0@time=3.5,back=2", {}),
    ("kill:server:0@call=20,back=2", {"checkpoint_steps": 3}),
    ("stop:1@time=2.5,for=3", {}),
    ("partition:1@time=2.5,for=3", {}),
    ("delay:1@time=2,by=0.5,for=3", {}),
    ("random:seed=7,count=5", {"servers": 2, "checkpoint_steps": 4}),
]


@pytest.mark.parametrize("scheme", ["sync", "async", "allreduce", "d-psgd", "hogwild"])
@pytest.mark.parametrize(("fault", "more"), FAULTS, ids=[fault for fault, _ in FAULTS])
def test_faults_leave_a_timeline_that_holds_together(
    scheme: str, fault: str, more: dict[str, Any], tmp_path: Path
) -> None:
    if not discovery.scheme(scheme).methods and ("server" in fault or "servers" in more):
        return
    settings: dict[str, Any] = {"workers": 3, "steps": 15, "faults": [fault], "network": "latency=0.05", **more}
    quiet = {"watch": lambda _: None, "warn": lambda _: None}
    plain = simulate("toy", scheme, **settings, **quiet)
    result, timeline = traced(scheme, **settings)
    assert (result.digest, result.fates) == (plain.digest, plain.fates)
    check(timeline)
    assert result.fates is not None
    assert timeline.count("gradient") == sum(result.fates.values())
    path = tmp_path / "trace.json.gz"
    chrome_trace.write(timeline, path)
    trace_format.checked(path)


def test_a_death_is_seen_with_its_restart() -> None:
    _, timeline = traced("async", workers=2, steps=20, faults=["kill:1@time=3.5,back=4"])
    told = [(one.role, one.kind, one.at) for one in timeline.instants if one.kind != "update"]
    assert told == [("worker:1", "kill", 3.5), ("worker:1", "restart", 7.5)]
    assert Interval("worker:1", "dead", 3.5, 7.5) in timeline.intervals
    assert Interval("worker:1", "gradient", 3.0, 3.5, "lost") in timeline.intervals


def test_a_return_to_a_checkpoint_is_seen() -> None:
    settings = {"faults": ["kill:server:0@call=20,back=2"], "checkpoint_steps": 3}
    result, timeline = traced("async", workers=2, steps=20, **settings)
    kinds = [one.kind for one in timeline.instants if one.kind in ("kill", "restart", "return")]
    assert kinds == ["kill", "restart", "return"]
    back = next(one for one in timeline.instants if one.kind == "return")
    seen = [int(one.detail) for one in timeline.instants if one.kind == "update"]
    assert len(seen) == result.updates + (result.rolled_back_updates or 0)
    waited = {one.role for one in timeline.intervals if one.kind == "return" and one.end == back.at}
    assert waited == {"worker:0", "worker:1"}
    assert timeline.count("checkpoint") > 1


def test_the_first_units_of_time_alone_are_recorded() -> None:
    timeline = Timeline(until=7.0)
    simulate("toy", "sync", trace=timeline, steps=20, watch=lambda _: None, **SLOW)
    check(timeline)
    assert timeline.end == 7.0
    assert timeline.left_out > 0
    assert max(one.end for one in timeline.intervals) == 7.0
    whole = traced("sync", steps=20, **SLOW)[1]
    begun = [one for one in whole.intervals if one.start <= 7.0]
    assert [one._replace(end=min(one.end, 7.0)) for one in begun] == timeline.intervals


def test_a_long_run_keeps_its_first_part() -> None:
    timeline = Timeline(most=50)
    result = simulate("toy", "async", trace=timeline, steps=100, workers=2, watch=lambda _: None)
    check(timeline)
    assert 50 <= len(timeline.intervals) + len(timeline.instants) <= 54  # and what was under way then
    assert timeline.end < (result.virtual_seconds or 0.0)
    assert timeline.left_out > 100


def test_a_run_that_deadlocks_leaves_its_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(RunError, match="deadlock"):
        simulate(
            "toy", "sync", workers=3, trace=str(path), faults=["kill:1@step=1"], quorum="hold", watch=lambda _: None
        )
    trace_format.checked(path)
    timeline = chrome_trace.read(path)
    assert [one.kind for one in timeline.instants if one.role == "worker:1"] == ["kill"]


def test_a_trace_is_read_back(tmp_path: Path) -> None:
    _, timeline = traced("sync", steps=9, faults=["kill:1@time=3.5,back=4"], **SLOW)
    path = tmp_path / "trace.json"
    chrome_trace.write(timeline, path)
    found = chrome_trace.read(path)
    assert [(one.role, one.kind, one.detail, one.by) for one in found.intervals] == [
        (one.role, one.kind, one.detail, one.by) for one in timeline.intervals
    ]
    assert [one.at for one in found.instants] == pytest.approx([one.at for one in timeline.instants])
    assert (found.end, found.virtual, found.about) == (timeline.end, True, timeline.about)
    assert found.about["scheme"] == "sync"


@pytest.mark.parametrize("content", ["", "[]", '{"traceEvents": []}', '{"otherData": {"format": "other"}}', "\xff"])
def test_other_files_are_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=r"trace\.json"):
        chrome_trace.read(path)


def test_a_file_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no trace can be written"):
        simulate("toy", "sync", trace=tmp_path / "none" / "trace.json")


def test_a_batched_simulation_has_the_same_timeline() -> None:
    settings = {"workers": 8, "steps": 40, "compute": "exponential:1.0"}
    _, single = traced("async", "digits-mlp", **settings)
    _, batched = traced("async", "digits-mlp", batched=True, **settings)
    assert single.intervals == batched.intervals


def test_the_events_say_who_ended_a_wait(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    simulate("toy", "sync", trace=path, steps=3, watch=lambda _: None, **SLOW)
    events = trace_format.checked(path)
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {threads[event["tid"]] for event in events if event["ph"] == "s"} == {"worker:3"}
    assert {threads[event["tid"]] for event in events if event["ph"] == "f"} == {f"worker:{n}" for n in range(3)}
    about = json.loads(path.read_text())["otherData"]["about"]
    assert about["updates"] == 3


def test_arrows_end_inside_intervals_whose_end_is_half_a_nanosecond(tmp_path: Path) -> None:
    """Of two calls that were performed until the same nanosecond, the first one ends in the middle."""
    timeline = Timeline(virtual=False)
    for begin, end in ((1_218_707_318, 1_218_714_525), (1_637_538_650, 1_637_542_639), (2_051_082_856, 2_051_096_095)):
        middle = begin / 1e9 + (end / 1e9 - begin / 1e9) / 2
        timeline.add(Interval("server:0", "call", begin / 1e9, middle, "push of worker:0", "worker:0"))
        timeline.add(Interval("worker:0", "call", begin / 1e9, end / 1e9))
    timeline.finish(3.0)
    path = tmp_path / "trace.json"
    chrome_trace.write(timeline, path)
    trace_format.checked(path)


@given(st.lists(st.tuples(st.integers(0, 10**15), st.integers(0, 3000), st.integers(1, 7)), min_size=1, max_size=40))
def test_arrows_end_inside_intervals_wherever_these_begin_and_end(found: list[tuple[int, int, int]]) -> None:
    """Edges between two nanoseconds, intervals shorter than one, calls that share a moment, eleven days of training."""
    timeline, before = Timeline(virtual=False), 0.0
    for start, length, parts in sorted(found):
        begin, end = max(before, start / 1e9), start / 1e9 + length / 1e9 / parts
        if begin <= end:
            timeline.add(Interval("server:0", "call", begin, end, "push of worker:0", "worker:0"))
            timeline.add(Interval("worker:0", "call", begin, end))
            timeline.add(Interval("worker:1", "wait", begin, end, by="worker:0"))
            before = end
    timeline.finish(2e6)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        chrome_trace.write(timeline, path)
        trace_format.checked(path)
        for event in json.loads(path.read_text())["traceEvents"]:
            assert len(repr(event["ts"]).partition(".")[2]) <= 3
