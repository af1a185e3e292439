"""Hooks in real processes: what they print, write, change and end, and which processes run them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Commands, history_of, paceline
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import Status

from paceline import load, simulate
from paceline.config import build
from paceline.runs import checkpoint
from paceline.simulator.engine import SimulationEngine

__all__ = ["paceline"]  # a fixture

MINE = '''
from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline import Hook


@dataclass
class Everywhere(Hook, name="everywhere"):
    """Writes down who calls it."""

    where: str = "."

    def _note(self, session, event):
        with open(f"{self.where}/worker-{session.worker.rank}", "a") as file:
            file.write(event + "\\n")

    def begin(self, session):
        self._note(session, "begin")

    def after_step(self, session):
        self._note(session, "step")

    def end(self, session):
        self._note(session, "end")


@dataclass
class ChiefOnly(Everywhere, name="chief-only"):
    roles: ClassVar = frozenset({"chief"})


@dataclass
class WorkersOnly(Everywhere, name="workers-only"):
    roles: ClassVar = frozenset({"worker"})


@dataclass
class Breaks(Everywhere, name="breaks"):
    def after_step(self, session):
        if session.worker.rank == 1 and session.worker.t == 5:
            raise ZeroDivisionError("in my hook")

    def failed(self, session, error):
        self._note(session, f"failed {error}")


def zeros(batch, session):
    images, labels = batch.data
    return torch.zeros_like(images), labels


def late_nan(batch, session):
    images, labels = batch.data
    return (images * float("nan"), labels) if session.updates >= 10 else None
'''


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    return tmp_path


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would draw."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder))
        events.Reload()
        return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def trained(paceline: Commands, *hooks: str, scheme: str = "sync", steps: int = 60, workers: int = 2) -> dict[str, Any]:
    words = [word for hook in hooks for word in ("--hook", hook)]
    return paceline.train("-s", scheme, "-n", str(workers), "--steps", str(steps), *words)


# what they print and write


def test_those_that_print(paceline: Commands) -> None:
    hooks = ["log:every=10,values=update,loss", "step-counter:every=20", "step-printer:every=30", "final-metrics"]
    words = [word for hook in hooks for word in ("--hook", hook)]
    shown = paceline("train", "digits-mlp", "-n", "2", "--steps", "60", *words, "--json")
    assert shown.code == 0, shown.err
    lines = shown.err.splitlines()
    assert sum(line.startswith("worker:0 step ") for line in lines) >= 5
    assert any("updates/s" in line for line in lines)
    for rank in range(2):  # everybody prints, wherever it runs
        assert any(line.startswith(f"worker:{rank} local step 30  global step ") for line in lines)
    (last,) = [line for line in lines if line.startswith("at the end: update 60")]
    assert f"loss {shown.json['loss']:.4g}" in last
    rates = history_of(shown.json, "updates_per_second")
    assert rates
    assert all(point["updates_per_second"] > 0 for point in rates)
    log = Path(shown.json["directory"], "logs/worker-1.log").read_text(encoding="utf-8")
    assert "worker:1 local step 30" in log


def test_those_that_write_files(paceline: Commands) -> None:
    hooks = ["summary-saver:every=10", "validation:every=20", "staleness-record:every=10", "profiler:every=20,most=2"]
    result = trained(paceline, *hooks, steps=100)
    run = Path(result["directory"])
    drawn = scalars(run / "summaries")
    assert {"loss", "staleness_mean", "samples_per_second", "updates_per_second"} <= drawn.keys()
    assert all(0 < step <= 100 for step, _ in drawn["loss"])
    validated = scalars(run / "summaries/validation")
    points = history_of(result, "accuracy")
    assert [value for _, value in validated["accuracy"]] == pytest.approx([point["accuracy"] for point in points])
    staleness = json.loads((run / "staleness.json").read_text(encoding="utf-8"))
    assert staleness["histogram"] == result["staleness"]["histogram"]
    assert history_of(result, "staleness_mean")
    (first, *_) = traces = sorted((run / "profiles").iterdir())
    assert len(traces) <= 2
    assert first.name.startswith("worker-0-step-")
    assert json.loads(first.read_text(encoding="utf-8"))["traceEvents"]


def hparams_session(run: Path) -> tuple[dict[str, Any], int]:
    """Hyper-parameters of a run, and the status of its end, as TensorBoard's plugin reads them."""
    found = EventAccumulator(str(run / "summaries/final"))
    found.Reload()
    contents = found.PluginTagToContent(metadata.PLUGIN_NAME)
    start = metadata.parse_session_start_info_plugin_data(contents[metadata.SESSION_START_INFO_TAG])
    end = metadata.parse_session_end_info_plugin_data(contents[metadata.SESSION_END_INFO_TAG])
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()}, end.status


def test_tensorboard_has_hyper_parameters_final_metrics_and_what_the_page_shows(paceline: Commands) -> None:
    result = trained(paceline, steps=100)
    run = Path(result["directory"])
    hyper, status = hparams_session(run)
    assert status == Status.STATUS_SUCCESS
    wanted = {"task": "digits-mlp", "workers": 2.0, "scheme": result["scheme"], "lr": result["hyper"]["lr"]}
    assert wanted.items() <= hyper.items()
    final = {name: value for name, [(_, value)] in scalars(run / "summaries/final").items()}
    assert final["final/accuracy"] == pytest.approx(result["metrics"]["accuracy"])
    assert final["final/samples_per_second"] == pytest.approx(result["samples_per_second"])
    course = scalars(run / "summaries/run")
    assert {"loss", "samples_per_second", "staleness_mean", "waiting/chief", "waiting/worker:1"} <= course.keys()


def test_tensorboard_is_told_of_a_failure(paceline: Commands) -> None:
    failed = paceline("train", "toy", "-s", "sgd", "lr=1e30", "--steps", "100", "--dir", "run")
    assert failed.code == 1
    hyper, status = hparams_session(Path("run"))
    assert (status, hyper["lr"]) == (Status.STATUS_FAILURE, 1e30)


def test_averaged_weights_are_in_the_checkpoint(paceline: Commands) -> None:
    """Where there is no server nothing races: each centre of the simulator enters once, also after going on."""
    words = ["-s", "allreduce", "-n", "2", "--hook", "weight-ema:decay=0.9", "--dir", "run"]
    first = paceline.train("--steps", "20", *words)
    assert history_of(first, "ema_loss")
    expected = build.task_of("digits-mlp", {}).start(0)

    def enter(engine: SimulationEngine) -> None:
        expected.lerp_(engine.scheme.model(engine.centre), 1 - 0.9)

    simulate("digits-mlp", "allreduce", workers=2, steps=20, watch=enter)
    average = flat(load("run", ema=True))
    assert torch.equal(average, expected)
    saved = checkpoint.newest(Path("run/checkpoints"), lambda _: None)
    assert saved is not None
    assert torch.equal(average, saved.tensors["hook.ema"])
    paceline("train", "--resume", "run", "--steps", "40", "--json")
    whole = paceline.train("--steps", "40", *words[:-1], "whole")
    assert torch.equal(flat(load("run", ema=True)), flat(load("whole", ema=True)))
    assert whole["updates"] == 40
    assert paceline("evaluate", "run", "--ema").code == 0


def flat(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


# what they change


@pytest.mark.parametrize(
    "hook",
    [
        "learning-rate:base=0.2,kind=linear,over=30",
        "learning-rate:base=0.2,kind=step,over=7,gamma=0.5,warmup=5",
    ],
)
def test_a_schedule_is_the_same_for_all(hook: str, paceline: Commands) -> None:
    real = trained(paceline, hook, scheme="allreduce", steps=30, workers=3)
    virtual = simulate("digits-mlp", "allreduce", workers=3, steps=30, hooks=hook, say=lambda _: None)
    assert real["digest"] == virtual.digest
    assert real["digest"] != simulate("digits-mlp", "allreduce", workers=3, steps=30).digest


@pytest.mark.parametrize("servers", ["1", "2"])
def test_the_servers_have_the_new_learning_rate(servers: str, paceline: Commands) -> None:
    words = ["-n", "2", "--servers", servers]
    constant = paceline.train(*words, "--steps", "20", "--hook", "learning-rate:base=0.02")
    assert constant["digest"] == simulate("digits-mlp", "sync", workers=2, steps=20, lr=0.02).digest
    falling = "learning-rate:base=0.02,kind=step,over=10,gamma=0"  # nothing is left of it after 10 updates
    ended = paceline.train(*words, "--steps", "40", "--hook", falling)
    assert ended["digest"] == simulate("digits-mlp", "sync", workers=2, steps=10, lr=0.02).digest
    assert ended["updates"] == 40


@pytest.mark.parametrize("scheme", ["sync", "sagn", "sync-rates"])
def test_a_schedule_at_a_server_gives_the_same_bits_each_time(scheme: str, paceline: Commands) -> None:
    hook = "learning-rate:base=0.2,kind=cosine,over=30,warmup=4"
    real = trained(paceline, hook, scheme=scheme, steps=30, workers=3)
    virtual = simulate("digits-mlp", scheme, workers=3, steps=30, hooks=hook, say=lambda _: None)
    assert real["digest"] == virtual.digest
    given = simulate("digits-mlp", scheme, workers=3, steps=30, lr="cosine:0.2,over=30,warmup=4")
    assert given.digest == virtual.digest


def test_a_feed_function_replaces_mini_batches(mine: Path, paceline: Commands) -> None:
    hook = f"feed-function:function={mine / 'mine.py'}:zeros"
    real = trained(paceline, hook, steps=20)
    assert real["digest"] == simulate("digits-mlp", "sync", workers=2, steps=20, hooks=hook).digest
    assert real["digest"] != simulate("digits-mlp", "sync", workers=2, steps=20).digest


# what they end


def test_the_end_by_a_target_and_by_patience(paceline: Commands) -> None:
    reached = trained(paceline, "target:value=0.8,every=10", steps=100_000)
    assert "reached the target 0.8" in reached["stopped"]
    assert reached["updates"] < 1000
    assert reached["metrics"]["accuracy"] > 0.75
    words = ["lr=0", "--steps", "100000", "--hook", "early-stop:patience=2,every=10"]
    assert "is no better than" in paceline.train(*words)["stopped"]


def test_a_loss_that_is_no_number(mine: Path, paceline: Commands) -> None:
    feed = f"feed-function:function={mine / 'mine.py'}:late_nan"
    stopped = trained(paceline, feed, "nan-guard:action=stop", steps=1000)
    assert "the loss is nan" in stopped["stopped"]
    assert 10 <= stopped["updates"] <= 12
    assert stopped["metrics"]["loss"] == stopped["metrics"]["loss"]  # what was spoilt did not enter the centre
    for hook in (["--hook", "nan-guard"], []):
        shown = paceline("train", "digits-mlp", "--steps", "1000", "--hook", feed, *hook)
        assert shown.code == 1
        assert "the loss is nan; a smaller lr" in shown.err


# who runs them


def test_which_processes_run_a_hook(mine: Path, paceline: Commands) -> None:
    kinds = {"Everywhere": [0, 1, 2], "ChiefOnly": [0], "WorkersOnly": [1, 2]}
    for kind in kinds:
        (mine / kind).mkdir()
    hooks = [f"{mine / 'mine.py'}:{kind}:where={mine / kind}" for kind in kinds]
    result = trained(paceline, *hooks, scheme="async", workers=3)
    assert result["updates"] == 60
    for kind, ranks in kinds.items():
        assert sorted(path.name for path in (mine / kind).iterdir()) == [f"worker-{rank}" for rank in ranks]
        for path in (mine / kind).iterdir():
            begin, *_, end = path.read_text(encoding="utf-8").split()
            assert (begin, end) == ("begin", "end")


def test_a_hook_that_breaks_ends_the_run_and_all_hear_of_it(mine: Path, paceline: Commands) -> None:
    hook = f"{mine / 'mine.py'}:Breaks:where={mine}"
    shown = paceline("train", "digits-mlp", "-n", "2", "--steps", "1000", "--hook", hook)
    assert shown.code == 1
    assert "worker:1, step 5: ZeroDivisionError: in my hook" in shown.err
    assert "worker-1.log" in shown.err
    assert (mine / "worker-1").read_text(encoding="utf-8").split("\n")[1:3] == ["failed in my hook", "end"]
    assert (mine / "worker-0").read_text(encoding="utf-8").split()[-1] == "end"
