"""`paceline train` as a user meets it: what it prints, what it refuses, what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from command_line import Commands, history_of, paceline, steps_of

from paceline import simulate
from paceline.runs import checkpoint
from paceline.runs.run_directory import RunDirectory

__all__ = ["paceline"]  # a fixture

REAL = {
    *(
        "wall_seconds",
        "samples_per_second",
        "time_to_first_step",
        "restarts",
        "rolled_back_updates",
        "lost_updates",
        "peak_rss_mb",
    ),
    *("servers", "directory", "fingerprint"),
}


def process(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *words]
    env = os.environ | {"COLUMNS": "200"} | environment
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=120, check=False)


# what it prints


def test_a_process_of_its_own_shows_lines_and_a_table(tmp_path: Path) -> None:
    ran = process("train", "digits-mlp", "--steps", "40", "--every", "20", "--plain", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    for word in (
        "sync on digits-mlp",
        "workers",
        "servers",
        "accuracy",
        "updates of the centre",
        "wall time",
        "digest",
    ):
        assert word in ran.stdout
    assert "samples per second" in ran.stdout
    assert "runs/digits-mlp-sync-001" in ran.stdout
    assert "validation: update 2" in ran.stderr
    assert "update 40/40  100%" in ran.stderr.splitlines()[-1]
    assert "Traceback" not in ran.stderr


def test_json_is_one_object_with_all_that_simulate_gives_and_more(paceline: Commands) -> None:
    shown = paceline("train", "digits-mlp", "-s", "sync", "-n", "2", "--steps", "30", "--json")
    assert shown.out.count("\n") == 1
    result = shown.json
    virtual = simulate("digits-mlp", "sync", workers=2, steps=30).as_dict()
    assert result.keys() == virtual.keys() | REAL
    for key in ("scheme", "task", "workers", "updates", "gradients", "samples", "metrics", "digest", "hyper", "batch"):
        assert result[key] == virtual[key]
    assert result["virtual_seconds"] is None
    assert result["servers"] == 1
    assert (result["restarts"], result["rolled_back_updates"], result["lost_updates"]) == (0, 0, 0)
    assert all(result[key] > 0 for key in ("wall_seconds", "samples_per_second", "time_to_first_step", "peak_rss_mb"))
    assert Path(result["directory"]).is_dir()


def test_a_run_that_fails_prints_what_it_had_reached(paceline: Commands) -> None:
    shown = paceline("train", "toy", "-s", "async", "lr=3", "-n", "2", "--json", "--checkpoint-every", "5")
    assert shown.code == 1
    assert "the loss is inf" in shown.err
    reached = json.loads(shown.out)
    assert "the loss is inf" in reached["error"]
    assert "failed" in paceline("runs").out


def test_warnings_of_stability_are_said_and_kept(paceline: Commands) -> None:
    shown = paceline("train", "toy", "-s", "async", "lr=0.3", "-n", "4", "--steps", "5", "--json")
    assert "crosses 0.445" in shown.err
    assert any("crosses 0.445" in text for text in shown.json["warnings"])
    calm = paceline("train", "toy", "-s", "async", "lr=0.3", "-n", "4", "--steps", "5", "--curvature", "0.1", "--json")
    assert calm.json["warnings"] == []


def test_every_evaluates_on_the_way(paceline: Commands) -> None:
    points = history_of(paceline.train("--steps", "60", "--every", "20", "-n", "1"))
    assert points[-1]["update"] == 60
    assert 20 <= points[0]["update"] < 40
    assert len(points) == 3
    assert all({"update", "seconds", "loss", "accuracy"} <= point.keys() for point in points)
    virtual = simulate("digits-mlp", "sync", workers=1, steps=60, every=60)
    assert points[-1]["loss"] == virtual.history[-1].metrics["loss"]


# what it refuses


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["digits-mpl"], 2, "did you mean 'digits-mlp'?"),
        (["toy", "-s", "downpor"], 2, "no scheme 'downpor'; did you mean 'downpour'?"),
        (["toy", "windo=3", "-s", "agn"], 2, "did you mean 'window'?"),
        (["toy", "window=0", "-s", "agn"], 2, "window must be at least 1, not 0"),
        (["toy", "rule=adm"], 2, "did you mean 'adam'?"),
        (["toy", "--hook", "valdation"], 2, "did you mean 'validation'?"),
        (["toy", "--hook", "log:evry=3"], 2, "did you mean 'every'?"),
        (["absent.py:task"], 2, "no file 'absent.py'"),
        (["digits-mlp", "task.hiden=3"], 2, "did you mean 'hidden'?"),
        (["digits-mlp", "task.hidden=0"], 2, "hidden must be a whole number of at least 1"),
        ([], 2, "give a task"),
        (["toy", "batch=3"], 2, "--batch"),
        (["toy", "workers=3"], 2, "--workers"),
        (["toy", "checkpoint_steps=3"], 2, "--checkpoint-every"),
        (["toy", "lr"], 2, "key=value"),
        (["toy", "--workers", "0"], 2, "workers must be at least 1, not 0"),
        (["toy", "--workers", "two"], 2, "train: workers must be a whole number, not 'two'"),
        (["toy", "--servers", "0"], 2, "sync needs a server: servers must be at least 1, not 0"),
        (["toy", "--servers", "-1"], 2, "servers must be at least 0, not -1"),
        (["toy", "--steps", "0"], 2, "steps must be at least 1, not 0"),
        (["toy", "--seconds", "0"], 2, "seconds must be above 0"),
        (["toy", "--batch", "0"], 2, "batch must be at least 1, not 0"),
        (["toy", "--patience", "0"], 2, "patience must be above 0, not 0"),
        (["toy", "--restarts", "-1"], 2, "restarts must be at least 0, not -1"),
        (["toy", "--device", "tpu"], 2, "device must be cpu, cuda or cuda:K, not 'tpu'"),
        (["toy", "--threads", "0"], 2, "threads must be at least 1, not 0"),
        (["toy", "--quorum", "half"], 2, "quorum must be one of shrink, hold, not 'half'"),
        (["toy", "--feed", "all"], 2, "feed must be one of shared, shard, slice, not 'all'"),
        (["toy", "--checkpoint-every", "0"], 2, "checkpoint_steps must be at least 1, not 0"),
        (["toy", "--checkpoint-seconds", "0"], 2, "checkpoint_seconds must be above 0"),
        (["toy", "--keep", "0"], 2, "keep must be at least 1, not 0"),
        (["toy", "--evaluator", "--throttle", "-1"], 2, "throttle must be at least 0, not -1"),
        (["toy", "--evaluator", "--start-delay", "nan"], 2, "start_delay must be at least 0, not nan"),
        (["toy", "--evaluator", "--eval-steps", "0"], 2, "eval_steps must be at least 1, not 0"),
        (["toy", "--evaluator", "--eval-steps", "3"], 2, "omit eval_steps"),
        (["toy", "--throttle", "3"], 2, "add --evaluator"),
        (["toy", "--every", "-1"], 2, "every must be at least 0, not -1"),
        (["toy", "--curvature", "inf"], 2, "curvature must be a finite number"),
        (["toy", "-s", "sgd", "--workers", "2"], 2, "it takes 1 worker, not 2"),
        (["--resume", "absent"], 2, "no run 'absent'"),
        (["cifar-cnn", "--steps", "1"], 3, "cifar"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_clear_line_a_code_and_no_run(
    words: list[str], code: int, said: str, paceline: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path))
    shown = paceline("train", *words)
    assert shown.code == code, shown.err
    assert said in shown.err.replace("\n", " ")
    assert shown.out == ""
    assert not (tmp_path / "runs").exists()


def test_a_directory_in_use_is_refused(paceline: Commands) -> None:
    run = paceline.train("--steps", "5", "--dir", "mine")["directory"]
    again = paceline("train", "digits-mlp", "--steps", "5", "--dir", "mine")
    assert again.code == 2
    assert "exists and is not empty; use --resume" in again.err
    with RunDirectory(Path(run)).lock():
        held = paceline("train", "--resume", "mine", "--steps", "10", "-s", "sync")
    assert held.code == 2
    assert "another run is using it" in held.err
    assert json.loads((Path(run) / "plan.json").read_text(encoding="utf-8"))["steps"] == 5


# what it leaves behind


def test_the_commands_on_runs(paceline: Commands, tmp_path: Path) -> None:
    result = paceline.train("--steps", "40")
    (listed,) = [json.loads(line) for line in paceline("runs", "--json").out.splitlines()]
    assert (listed["run"], listed["state"], listed["updates"]) == ("digits-mlp-sync-001", "done", 40)
    assert listed["accuracy"] == result["metrics"]["accuracy"]
    shown = paceline("show", "digits-mlp-sync-001").out
    for word in ("digits-mlp", "sync", "checkpoints", "40", result["digest"][:16]):
        assert word in shown
    told = paceline("evaluate", "digits-mlp-sync-001", "--json").json
    assert (told["metrics"], told["step"]) == (result["metrics"], 40)
    np.save(tmp_path / "digits.npy", np.zeros((3, 8, 8), dtype=np.float32))
    lines = [json.loads(line) for line in paceline("predict", "digits-mlp-sync-001", "digits.npy").out.splitlines()]
    by_option = paceline("predict", "digits-mlp-sync-001", "--input", "digits.npy").out.splitlines()
    assert [json.loads(line) for line in by_option] == lines
    assert len(lines) == 3
    assert all(len(line["scores"]) == 10 and line["label"] in range(10) for line in lines)


def test_checkpoints_on_the_way_and_how_many_are_kept(paceline: Commands) -> None:
    run = paceline.train("--steps", "300", "--checkpoint-every", "20", "--keep", "3")["directory"]
    steps = steps_of(run)
    assert len(steps) == 3
    assert steps[-1] == 300
    assert all(0 < later - earlier <= 100 for earlier, later in pairwise(steps))
    saved = checkpoint.newest(Path(run) / "checkpoints", lambda _: None)
    assert saved is not None
    assert saved.numbers["seed"] == 0


def test_the_evaluator_follows_and_keeps_the_best(paceline: Commands) -> None:
    words = ["--evaluator", "--checkpoint-every", "20", "--steps", "200", "--keep", "20"]
    shown = paceline("train", "digits-mlp", *words, "--json")
    result, points = shown.json, history_of(shown.json)
    assert "evaluator: update 200" in shown.err
    assert points[-1]["update"] == 200
    assert points[-1]["accuracy"] == result["metrics"]["accuracy"]
    assert {point["update"] for point in points} <= set(steps_of(result["directory"]))
    best = checkpoint.best(Path(result["directory"]))
    assert best is not None
    assert (best.metric, best.value) == ("accuracy", max(point["accuracy"] for point in points))
    assert paceline("evaluate", result["directory"], "--which", "best", "--json").json["metrics"] == best.metrics


def test_the_evaluator_waits_as_it_is_told(paceline: Commands) -> None:
    """A throttle longer than the run: the first checkpoint and the last. A delay longer than it: the last alone."""
    words = ["--evaluator", "--checkpoint-every", "10", "--steps", "100"]
    throttled = history_of(paceline.train(*words, "--throttle", "60"))
    assert [point["update"] for point in throttled][-1] == 100
    assert len(throttled) <= 2
    delayed = history_of(paceline.train(*words, "--start-delay", "60", "--best", "loss"))
    assert [point["update"] for point in delayed] == [100]


def test_the_evaluator_takes_part_of_the_test_data(paceline: Commands) -> None:
    result = paceline.train("--evaluator", "--eval-steps", "2", "--steps", "50", "--batch", "16")
    last = history_of(result)[-1]
    assert last["update"] == 50
    assert (last["accuracy"] * 32).is_integer()
    assert result["metrics"]["accuracy"] != last["accuracy"]  # the chief's, on all of them


def test_an_evaluator_with_an_unknown_metric_is_told(paceline: Commands) -> None:
    shown = paceline("train", "digits-mlp", "--evaluator", "--best", "acuracy", "--steps", "20")
    assert shown.code == 2
    assert "did you mean 'accuracy'?" in shown.err


def test_it_ends_after_so_many_seconds(paceline: Commands) -> None:
    result = paceline.train("-s", "async", "--seconds", "0.3", "--steps", "100000000")
    assert 0.3 <= result["wall_seconds"] < 5
    assert "0.3 seconds have passed" in result["stopped"]
