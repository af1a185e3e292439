"""Every kind of data in real processes: a resumed run has the bits of an unbroken one, and replays."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit"))  # the tasks are those of the unit tests

from data_kinds import KINDS, N
from processes import finished, run

from paceline import Result, replay, simulate
from paceline.api.execute import execute
from paceline.config.validate import planned
from paceline.runs.run_directory import RunDirectory
from paceline.task import Task

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def trained(task: Task, steps: int, place: RunDirectory) -> Result:
    plan, scheme, objects = planned(task, "sync", hyper={"lr": 0.01}, workers=2, seed=3, steps=steps)
    plan = dataclasses.replace(plan, directory=str(place.path), title="test")
    return execute(plan, scheme, objects, tell=lambda *_: None, watch=lambda _: None)


@pytest.mark.parametrize("kind", list(KINDS))
def test_resumed_with_the_bits_of_an_unbroken_run(kind: str, tmp_path: Path) -> None:
    task = KINDS[kind](tmp_path)
    place = RunDirectory.create(tmp_path / "run", "run")
    trained(task, 37, place)  # a source with states has kept one by then
    assert (place.path / "data").exists() == (kind == "stateful")
    resumed = trained(task, 45, place)
    whole = simulate(task, "sync", workers=2, seed=3, steps=45, lr=0.01)
    assert (resumed.updates, resumed.digest, resumed.epochs) == (45, whole.digest, whole.epochs)
    assert replay(place.path, task=task).match


@pytest.mark.parametrize("kind", ["loader with processes", "stateful"])
def test_killed_workers_continue_with_their_batches(kind: str, tmp_path: Path) -> None:
    """The processes that read ahead end with their worker: none keeps the directory locked."""
    task = KINDS[kind](tmp_path)
    story = run(tmp_path / "run", task, "async", workers=2, steps=300, kills=["worker:1", "chief", "worker:1"])
    assert finished(story, 300).restarts == 3
    with story.directory.lock():
        assert replay(story.directory.path, task=task).match


def test_a_batch_larger_than_the_data_is_said(tmp_path: Path) -> None:
    story = run(tmp_path / "run", KINDS["tensors"](tmp_path), "sync", workers=2, steps=2, batch=N + 1)
    finished(story, 2)
    assert story.told("batch 27 is larger than the 26 training samples")
