"""kill -9 of every role under every family of schemes: the run goes on, loses nothing, and ends as it was asked to.

Data: scikit-learn's digits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from processes import finished, leaving_nothing, run

from paceline.runs import checkpoint

STEPS = 600
STILL = 8.0  # seconds that nobody but the killed may stand still: far below patience, far above a busy machine's fork


@dataclass(frozen=True)
class Case:
    """A family, and who is killed one after another."""

    scheme: str
    kills: tuple[str, ...] = ("worker:1", "server:0", "worker:1", "chief", "worker:1")
    settings: dict[str, Any] = field(default_factory=dict)
    over: int = 0  # updates past the goal: where no server counts, a worker that is under way finishes its step
    alone: bool = False  # nobody is left when one dies


WITHOUT_SERVER = ("worker:1", "chief", "worker:1", "worker:1")
CASES = {
    "async": Case("async"),
    "sync": Case("sync"),
    "sync-backup": Case("sync", settings={"workers": 3, "hyper": {"aggregate": 2}}),
    "allreduce": Case("allreduce", WITHOUT_SERVER),
    "hogwild": Case("hogwild", over=1),
    "agn": Case("agn", settings={"hyper": {"window": 4}}),
    "downpour": Case("downpour", settings={"hyper": {"lr": 0.05}}),
    "dynsgd": Case("dynsgd"),
    "aeasgd": Case("aeasgd", settings={"hyper": {"window": 4}}),
    "easgd": Case("easgd", WITHOUT_SERVER),
    "groups": Case("groups", settings={"workers": 4}),
    "averaging": Case("averaging", WITHOUT_SERVER, settings={"hyper": {"window": 4}}),
    "d-psgd": Case("d-psgd", WITHOUT_SERVER, settings={"workers": 3}),
    "ad-psgd": Case("ad-psgd", WITHOUT_SERVER, settings={"workers": 3}),
    "gosgd": Case("gosgd", WITHOUT_SERVER, settings={"workers": 3}),
    "sgp": Case("sgp", WITHOUT_SERVER, settings={"workers": 3}),
    "sgd": Case("sgd", ("chief",) * 4, settings={"workers": 1}, alone=True),
}


@pytest.mark.parametrize("name", CASES)
def test_every_role_is_killed_again_and_again(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    settings = {"workers": 2, "steps": STEPS, "checkpoint_seconds": 0.5} | case.settings
    calm = finished(run(tmp_path / "calm", "digits-mlp", case.scheme, **settings), STEPS, over=case.over)
    with leaving_nothing():
        story = run(tmp_path / "faults", "digits-mlp", case.scheme, kills=case.kills, **settings)
    result = finished(story, STEPS, over=case.over)
    assert [fault.name for fault in story.faults] == list(case.kills)
    assert result.restarts == len(case.kills)
    assert story.standstill
    assert max(story.standstill.values()) < STILL
    assert all(above >= 0 for above in story.falls), "updates that a checkpoint held were lost"
    if not (case.alone or story.told("died inside a call")):
        assert result.rolled_back_updates == 0
        assert not story.falls
    assert result.metrics["accuracy"] > calm.metrics["accuracy"] - 0.03


@pytest.mark.parametrize("scheme", ["async", "sync", "aeasgd"])
def test_either_of_two_servers_is_killed(scheme: str, tmp_path: Path) -> None:
    kills = ["server:0", "server:1", "worker:1", "server:1", "chief", "server:0"]
    settings: dict[str, Any] = {"workers": 2, "servers": 2, "steps": STEPS, "checkpoint_seconds": 0.5}
    with leaving_nothing():
        story = run(tmp_path / "run", "digits-mlp", scheme, kills=kills, **settings)
    result = finished(story, STEPS)
    assert result.restarts == len(kills)
    assert max(story.standstill.values()) < STILL
    assert all(above >= 0 for above in story.falls)
    assert result.rolled_back_updates == 0 or story.told("died inside a call")
    assert result.metrics["accuracy"] > 0.85


def test_the_evaluator_is_killed(tmp_path: Path) -> None:
    with leaving_nothing():
        story = run(
            tmp_path / "run",
            "digits-mlp",
            "sync",
            kills=["evaluator"] * 3,
            workers=2,
            steps=STEPS,
            checkpoint_steps=50,
            evaluator=True,
        )
    result = finished(story, STEPS)
    assert result.restarts == 3
    assert max(story.standstill.values()) < STILL
    assert result.history[-1].update == STEPS  # its last look was at the last checkpoint
    best = checkpoint.best(story.directory.path)
    assert best is not None
    assert best.value == max(point.metrics["accuracy"] for point in result.history)
