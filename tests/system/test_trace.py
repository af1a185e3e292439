"""`paceline trace` of real runs: what is in the file, also of a run whose worker was killed, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import in_step
from beds import trace_format
from command_line import Commands, paceline
from processes import finished, leaving_nothing, run

from paceline.report import chrome_trace
from paceline.runs import order_log
from paceline.runs.order_log import RecordKind
from paceline.runtime.timeline import Timeline

__all__ = ["paceline"]  # a fixture


def traced(paceline: Commands, *words: str) -> Timeline:
    shown = paceline("trace", *words, "--out", "trace.json")
    assert shown.code == 0, shown.err
    trace_format.checked(Path("trace.json"))
    return chrome_trace.read(Path("trace.json"))


def overlaps(made: Timeline) -> list[str]:
    found = []
    for role in made.roles:
        own = sorted((one for one in made.intervals if one.role == role), key=lambda one: (one.start, one.end))
        found += [f"{role}: {one} {two}" for one, two in pairwise(own) if two.start < one.end - 2e-9]
    return found


def gradients_recorded(directory: Path) -> int:
    logs = [order_log.read(path) for path in sorted((directory / "order" / "001").glob("worker-*.log"))]
    return sum(record.kind == RecordKind.GRAD for log in logs for record in log.records)


def test_a_worker_and_a_server_are_killed(paceline: Commands, tmp_path: Path) -> None:
    with leaving_nothing():
        kills = ("worker:1", "server:0")
        story = run(tmp_path / "run", "digits-mlp", "sync", kills=kills, workers=2, steps=300, checkpoint_seconds=0.5)
    finished(story, 300)
    made = traced(paceline, "run")
    assert not overlaps(made)
    kills_seen = [(one.role, one.kind) for one in made.instants if one.kind in ("kill", "restart")]
    assert sorted(kills_seen) == sorted((role, kind) for role in kills for kind in ("kill", "restart"))
    assert "SIGKILL" in next(one.detail for one in made.instants if one.kind == "kill")
    (dead,) = [one for one in made.intervals if one.kind == "dead" and one.role == "worker:1"]
    during = [one for one in made.intervals if one.role == "worker:1" and dead.start <= one.start < dead.end - 2e-9]
    assert during == [dead]
    assert 0 <= made.count("gradient") - gradients_recorded(tmp_path / "run") <= len(kills)
    assert {"gradient", "call", "wait", "checkpoint", "dead"} <= {one.kind for one in made.intervals}
    explained(made, "sync")


def explained(made: Timeline, scheme: str) -> None:
    """Every wait has an arrow or says what ended it. What a killed process ended is not known, nor who is late for a
    checkpoint: these are few."""
    waits = [one for one in made.intervals if one.kind == "wait"]
    bare = [one for one in waits if not one.by and not one.detail.startswith("until")]
    assert len(bare) <= max(4, len(waits) // 50), (scheme, len(waits), bare)


def test_all_gradients_and_updates_of_a_calm_run_are_there(paceline: Commands, tmp_path: Path) -> None:
    together = f"{in_step.__file__}:InStep:folder={tmp_path}"
    result = paceline.train("-s", "async", "-n", "2", "--steps", "200", "--dir", "run", "--hook", together)
    made = traced(paceline, "run")
    assert not overlaps(made)
    assert made.count("gradient") == gradients_recorded(Path("run"))
    assert made.count("update") == result["updates"]
    served = [one for one in made.intervals if one.role == "server:0"]
    assert len(served) == result["updates"]
    assert {(one.kind, one.by, one.detail) for one in served} == {
        ("call", f"worker:{rank}", f"push of worker:{rank}") for rank in (0, 1)
    }
    assert not made.virtual
    shown = paceline("trace", "run", "--out", "trace.json.gz", "--since", "0.01")
    assert shown.code == 0
    assert "worker:1" in shown.out
    trace_format.checked(Path("trace.json.gz"))


def test_means_are_there_where_no_server_is(paceline: Commands) -> None:
    paceline.train("-s", "allreduce", "-n", "2", "--steps", "50", "--dir", "run")
    made = traced(paceline, "run")
    assert made.count("mean") >= 100
    waits = {(one.role, one.by) for one in made.intervals if one.kind == "wait"}
    assert waits & {("worker:0", "worker:1"), ("worker:1", "worker:0")}
    assert waits <= {(f"worker:{one}", by) for one, other in ((0, 1), (1, 0)) for by in (f"worker:{other}", "")}
    explained(made, "allreduce")
    assert any("means are" in note for note in made.notes)


def test_a_run_that_failed_and_one_without_a_record(paceline: Commands) -> None:
    failed = paceline("train", "toy", "-s", "sgd", "lr=1e30", "--steps", "100", "--dir", "failed")
    assert failed.code == 1
    made = traced(paceline, "failed")
    assert made.count("gradient") == gradients_recorded(Path("failed"))
    paceline.train("--steps", "5", "--no-record", "--dir", "bare", task="toy")
    shown = paceline("trace", "bare")
    assert shown.code == 3
    assert "--no-record" in shown.err
    assert not Path("bare-trace.json").exists()
    assert paceline("trace", "nothing").code == 2
