"""A run that is ended and gone on with: where the order is fixed, it ends in the bits of one that was never ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import Commands, history_of, paceline, steps_of

from paceline import simulate
from paceline.runs.run_directory import RunDirectory

__all__ = ["paceline"]  # a fixture

FIXED = [
    ("sgd", 1, []),
    ("sync", 3, []),
    ("sync", 3, ["rule=adam", "lr=0.01"]),
    ("sagn", 2, []),
    ("allreduce", 3, ["rule=momentum"]),
    ("averaging", 2, []),
    ("easgd", 3, []),
    ("async", 1, []),
    ("downpour", 1, []),
    ("adag", 1, []),
    ("hogwild", 1, []),
]


def virtual(scheme: str, workers: int, hyper: list[str], steps: int) -> str:
    words = dict(word.split("=") for word in hyper)
    return simulate("digits-mlp", scheme, workers=workers, steps=steps, warn=lambda _: None, **words).digest


def begun(paceline: Commands, scheme: str, workers: int, hyper: list[str], *more: str) -> dict[str, Any]:
    return paceline.train("-s", scheme, "-n", str(workers), *hyper, "--dir", "run", *more)


def gone_on(paceline: Commands, *words: str) -> dict[str, Any]:
    return paceline("train", "--resume", "run", *words, "--json").json


@pytest.mark.parametrize(("scheme", "workers", "hyper"), FIXED)
def test_gone_on_with_after_its_last_step(scheme: str, workers: int, hyper: list[str], paceline: Commands) -> None:
    first = begun(paceline, scheme, workers, hyper, "--steps", "15")
    assert first["digest"] == virtual(scheme, workers, hyper, 15)
    second = gone_on(paceline, "--steps", "30")
    assert second["digest"] == virtual(scheme, workers, hyper, 30)
    whole = simulate("digits-mlp", scheme, workers=workers, steps=30, warn=lambda _: None)
    assert (second["updates"], second["gradients"]) == (30, whole.gradients)


@pytest.mark.parametrize(("scheme", "workers", "hyper"), [one for one in FIXED if one[0] in ("sync", "sgd", "async")])
def test_gone_on_with_from_wherever_it_was_stopped(
    scheme: str, workers: int, hyper: list[str], paceline: Commands
) -> None:
    """Stopped by a hook, when each worker is inside a step of its own, pushes of some on their way."""
    first = begun(paceline, scheme, workers, hyper, "--steps", "40", "--hook", "stop-at-step:last_step=10")
    assert 10 <= first["updates"] < 40
    assert "reached the last step" in first["stopped"]
    second = gone_on(paceline, "--steps", "40", "--hook", "start-barrier")
    assert second["digest"] == virtual(scheme, workers, hyper, 40)


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_another_number_of_servers_changes_nothing(servers: int, paceline: Commands) -> None:
    begun(paceline, "sync", 2, ["rule=momentum"], "--steps", "15", "--servers", "2")
    second = gone_on(paceline, "--steps", "30", "--servers", str(servers))
    assert second["servers"] == servers
    assert second["digest"] == virtual("sync", 2, ["rule=momentum"], 30)


def test_what_is_known_of_the_run_goes_on_too(paceline: Commands) -> None:
    first = begun(paceline, "allreduce", 2, [], "--steps", "20", "--every", "10")
    second = gone_on(paceline, "--steps", "40")
    assert [point["update"] for point in history_of(second)] == [10, 20, 30, 40]
    assert second["samples"] == 2 * first["samples"]
    assert second["samples_per_second"] < 1.1 * (second["samples"] - first["samples"]) / second["wall_seconds"]
    assert max(steps_of("run")) == 40


def test_a_run_that_is_there_already_ends_at_once(paceline: Commands) -> None:
    first = begun(paceline, "sync", 2, [], "--steps", "20")
    again = gone_on(paceline)
    assert (again["updates"], again["digest"], again["metrics"]) == (20, first["digest"], first["metrics"])


def test_other_values_count_from_then_on(paceline: Commands) -> None:
    first = begun(paceline, "sync", 2, [], "--steps", "10")
    still = gone_on(paceline, "--steps", "20", "lr=0")
    assert still["digest"] == first["digest"]
    assert still["hyper"]["lr"] == 0


def test_the_sums_of_staleness_go_on(paceline: Commands) -> None:
    begun(paceline, "async", 2, [], "--steps", "50")
    second = gone_on(paceline, "--steps", "100")
    assert sum(second["staleness"]["histogram"].values()) == 100


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workers", "3"], "written with workers 2; it cannot resume with 3"),
        (["-s", "async"], "has scheme 'sync'; it cannot be resumed with 'async'"),
        (["toy"], "has task 'digits-mlp'; it cannot be resumed with 'toy'"),
        (["--dir", "other"], "omit --dir"),
        (["lr=-1"], "lr must be"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_another_run_is_refused_and_nothing_is_changed(words: list[str], said: str, paceline: Commands) -> None:
    begun(paceline, "sync", 2, [], "--steps", "10")
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    shown = paceline("train", "--resume", "run", "--steps", "20", *words)
    assert shown.code == 2
    assert said in shown.err
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before
    assert gone_on(paceline, "--steps", "12")["updates"] == 12


@pytest.mark.parametrize("scheme", ["sync", "allreduce"])
def test_a_damaged_checkpoint_is_passed_over(scheme: str, paceline: Commands) -> None:
    begun(paceline, scheme, 2, [], "--steps", "20", "--checkpoint-every", "5", "--keep", "9")
    newest = max(Path("run/checkpoints").iterdir(), key=lambda path: path.name)
    state = next(path for path in newest.iterdir() if path.suffix == ".safetensors")
    state.write_bytes(state.read_bytes()[:-8])
    shown = paceline("train", "--resume", "run", "--steps", "40", "--json")
    assert newest.name in shown.err
    assert shown.json["updates"] == 40
    if scheme == "allreduce":  # where there is a server, a checkpoint on the way finds the workers in different steps
        assert shown.json["digest"] == virtual(scheme, 2, [], 40)
    assert any(newest.name in text for text in shown.json["warnings"])


def test_a_plan_of_another_version_is_refused(paceline: Commands) -> None:
    begun(paceline, "sync", 2, [], "--steps", "5")
    run = RunDirectory(Path("run"))
    run.write_plan(run.plan() | {"of_the_future": 1})
    shown = paceline("train", "--resume", "run")
    assert shown.code == 2
    assert "unknown keys: of_the_future" in shown.err


def test_epochs_are_resumed_to_more_epochs(paceline: Commands) -> None:
    """Two workers of 32 samples: 23 updates are an epoch of the 1,437 samples, 45 are two."""
    first = begun(paceline, "sync", 2, [], "--epochs", "1")
    assert (first["updates"], first["samples"]) == (23, 1472)
    assert first["epochs"] == pytest.approx(1472 / 1437)
    second = gone_on(paceline, "--epochs", "2")
    assert second["updates"] == 45
    assert second["digest"] == virtual("sync", 2, [], 45)
    assert gone_on(paceline, "--steps", "50")["updates"] == 50
