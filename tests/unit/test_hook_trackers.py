"""The hooks of Weights & Biases and MLflow, in their local modes, with the real packages where they are installed."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hook_session import FakeSession, steps

from paceline import RunError, UsageError, simulate
from paceline.config.build import hook_of
from paceline.config.discovery import hooks
from paceline.hook import Hook
from paceline.hooks._metric import learning_rates

PLAN = '{"task": "digits-mlp", "scheme": "async", "hyper": {"lr": 0.5}, "best": ""}'


@pytest.fixture
def session(tmp_path: Path) -> FakeSession:
    place = tmp_path / "run-001"
    place.mkdir()
    (place / "plan.json").write_text(PLAN)
    session = FakeSession(place)
    session.set(lr="constant:0.5")
    session.metrics = {"loss": 0.25, "accuracy": 0.75}
    return session


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    name: str, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert name in hooks()  # it is listed although the package is missing
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        UsageError, match=rf"the hook {name} needs the package {name}; install it: .*paceline\[{name}\]"
    ):
        hook_of(name).begin(session)


def test_the_rates_of_a_scheme() -> None:
    seen: list[dict[str, float]] = []

    class Look(Hook, name="look"):
        def after_step(self, session: Any) -> None:
            if session.worker.rank == 0:
                seen.append(learning_rates(session))

    for scheme, hyper, expected in (
        ("async", {"lr": 0.25}, {"learning_rate": 0.25}),
        ("allreduce", {"lr": 0.25}, {"learning_rate": 0.25}),
        ("hogwild", {"lr": 0.25}, {"learning_rate": 0.25}),
        ("async", {"lr": "linear:1.0,over=4,unit=samples"}, {"learning_rate": 0.25}),
        ("sgd", {"rule": "adam", "lr": 0.25}, {"learning_rate": 0.25}),
        ("async", {"lr": "linear:1.0,over=4"}, {"learning_rate": 0.25}),  # after update 3
        (
            "downpour",
            {"lr": 0.25, "rule.lr": 0.5, "server.lr": 0.125},
            {"learning_rate": 0.5, "learning_rate_server": 0.125},
        ),
    ):
        seen.clear()
        simulate("toy", scheme, workers=1, steps=4, hooks=[Look()], warn=lambda _: None, **hyper)
        assert seen[-1] == expected


# MLflow


@pytest.fixture
def mlflow_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(None)
    return mlflow.MlflowClient()


def mlflow_run(client: Any) -> Any:
    (run,) = client.search_runs([client.get_experiment_by_name("paceline").experiment_id])
    return run


@pytest.mark.filterwarnings("ignore")  # those of MLflow and its libraries
def test_mlflow_gets_values_parameters_and_the_end(session: FakeSession, mlflow_client: Any) -> None:
    hook = hook_of("mlflow:every=4,evaluate=6")
    hook.begin(session)
    steps(hook, session, 8)
    assert mlflow_run(mlflow_client).info.status == "RUNNING"
    hook.end(session)
    run = mlflow_run(mlflow_client)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run-001")
    assert run.data.params == {"task": "digits-mlp", "scheme": "async", "hyper": "{'lr': 0.5}"}
    history = {name: mlflow_client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    assert [(one.step, one.value) for one in history["gradient_norm"]] == [(4, 20.0), (8, 40.0)]
    assert [(one.step, one.value) for one in history["learning_rate"]] == [(4, 0.5), (8, 0.5)]
    assert [(one.step, one.value) for one in history["test_accuracy"]] == [(6, 0.75), (8, 0.75)]
    assert {"loss", "samples", "staleness_mean", "updates_per_second", "samples_per_second"} <= history.keys()


@pytest.mark.filterwarnings("ignore")
def test_mlflow_continues_the_run_of_a_resumed_run_and_hears_of_a_failure(
    session: FakeSession, mlflow_client: Any
) -> None:
    for life in range(2):
        hook = hook_of("mlflow:every=1")
        hook.begin(session)
        steps(hook, session, 2)
        if life:
            hook.failed(session, RunError("the loss is NaN"))
        hook.end(session)
    run = mlflow_run(mlflow_client)  # there is one
    assert run.info.status == "FAILED"
    assert [one.step for one in mlflow_client.get_metric_history(run.info.run_id, "loss")] == [1, 2, 3, 4]


@pytest.mark.filterwarnings("ignore")
def test_mlflow_of_a_simulation(mlflow_client: Any) -> None:
    simulate("toy", "async", workers=2, steps=10, hooks=["mlflow:every=5,run=virtual"])
    run = mlflow_run(mlflow_client)
    assert (run.info.run_name, run.info.status) == ("virtual", "FINISHED")
    assert run.data.metrics["gradient_norm"] > 0


# Weights & Biases


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fails", [False, True])
def test_wandb_writes_its_files_offline(fails: bool, session: FakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")  # the hook's option has the last word
    hook = hook_of("wandb:every=4,evaluate=6,mode=offline,project=tests")
    hook.begin(session)
    steps(hook, session, 8)
    if fails:
        hook.failed(session, RunError("the loss is NaN"))
    hook.end(session)
    assert wandb.run is None
    wandb.teardown()  # its own process has written everything
    assert session.directory is not None
    (path,) = session.directory.glob("wandb/offline-run-*/run-*.wandb")
    names, values, exit_code, config = written(path)
    assert (names, exit_code) == (("tests", "run-001"), int(fails))
    assert config["task"] == '"digits-mlp"'
    assert [(one["update"], one["gradient_norm"]) for one in values if "gradient_norm" in one] == [(4, 20.0), (8, 40.0)]
    tests = [(one["update"], one["test_accuracy"]) for one in values if "test_accuracy" in one]
    assert tests == [(6, 0.75)] + [(8, 0.75)] * (not fails)


def written(path: Path) -> tuple[tuple[str, str], list[dict[str, float]], int, dict[str, str]]:
    """What a file of Weights & Biases holds: project and name, rows, exit code, settings."""
    from wandb.proto import wandb_internal_pb2

    names, rows, code, config = ("", ""), [], -1, {}
    for data in entries(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        match record.WhichOneof("record_type"):
            case "run":
                names = record.run.project, record.run.display_name
                config = {item.key: item.value_json for item in record.run.config.update}
            case "history":
                pairs = [(item.key or item.nested_key[0], item.value_json) for item in record.history.item]
                rows.append({key: json.loads(value) for key, value in pairs})
            case "exit":
                code = record.exit.exit_code
    return names, rows, code, config


def entries(content: bytes) -> Iterator[bytes]:
    """The entries of a log in LevelDB's format: blocks of 32 KiB, entries in one or several parts."""
    at, entry = 7, b""  # after the header of the file
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # the rest of a block
            at += 32768 - at % 32768
            continue
        _, length, part = struct.unpack_from("<IHB", content, at)
        entry += content[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):  # whole, or the last part
            yield entry
            entry = b""
