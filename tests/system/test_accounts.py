"""One account of a run: what it has saved, lost and rolled back, also when it fails and goes on later.

Data: scikit-learn's digits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from command_line import Commands, paceline
from processes import run

from paceline import replay
from paceline.hook import Hook, Session
from paceline.runs import checkpoint
from paceline.runs.replay.accounting import account, audit

__all__ = ["paceline"]  # pytest finds it here

EVERY = 25


@dataclass
class Breaks(Hook):
    """An error well after a checkpoint."""

    update: int
    roles = frozenset({"chief"})

    def before_step(self, session: Session) -> None:
        saved = checkpoint.steps((session.directory or Path()) / "checkpoints")
        if session.updates >= self.update and saved[-1] > 0 and session.updates >= saved[-1] + 5:
            raise RuntimeError("broken on purpose")


def failed(directory: Path, scheme: str, **settings: Any) -> dict[str, Any]:
    settings = {"workers": 2, "steps": 10**6, "checkpoint_steps": EVERY} | settings
    story = run(directory, "digits-mlp", scheme, hooks=[Breaks(settings.pop("update", 60))], **settings)
    assert "broken on purpose" in str(story.error), story.error
    told: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return told


@pytest.mark.parametrize(
    ("scheme", "hyper"),
    [("async", {}), ("downpour", {"window": 5}), ("sync", {}), ("averaging", {"window": 3}), ("hogwild", {})],
)
def test_the_numbers_of_a_failed_run_are_those_of_its_checkpoint(
    scheme: str, hyper: dict[str, Any], tmp_path: Path
) -> None:
    told = failed(tmp_path / "run", scheme, hyper=hyper)
    saved = checkpoint.newest(tmp_path / "run" / "checkpoints", lambda _: None)
    assert saved is not None
    persons = [saved.tensors[f"person.{rank}"].tolist() for rank in range(2)]
    assert told["updates"] == saved.step
    assert (told["gradients"], told["samples"]) == tuple(sum(person[k] for person in persons) for k in (1, 2))
    if scheme in ("async", "downpour"):  # one push, one update: the servers' part is of one moment
        assert sum(told["staleness"]["histogram"].values()) == told["updates"]
    assert told["lost_updates"] >= 5 - 1
    if scheme == "hogwild":
        return
    again = replay(tmp_path / "run")
    assert again.match, again.difference
    assert (again.recorded_updates, again.recorded_digest) == (told["updates"], told["digest"])
    assert again.updates >= told["updates"] + told["lost_updates"] - 1
    assert audit(tmp_path / "run") == []
    counted = account(tmp_path / "run")
    assert counted.rolled_back > 0
    assert counted.counted == told["gradients"]


@pytest.mark.parametrize(("scheme", "hyper"), [("downpour", {"window": 5}), ("averaging", {"window": 3})])
def test_totals_after_a_resume(scheme: str, hyper: dict[str, Any], tmp_path: Path) -> None:
    first = failed(tmp_path / "run", scheme, hyper=hyper)
    (tmp_path / "run.gate").unlink(missing_ok=True)
    goal = first["updates"] + 100
    kills = ("worker:1",)
    story = run(
        tmp_path / "run",
        "digits-mlp",
        scheme,
        kills=kills,
        hyper=hyper,
        workers=2,
        steps=goal,
        resume=True,
        first=goal - 60,
    )
    assert story.error is None, story.logs()
    assert story.result is not None
    assert story.result.rolled_back_updates == first["rolled_back_updates"] + first["lost_updates"]
    assert story.result.restarts == first["restarts"] + 1
    assert story.result.lost_updates == 0
    assert audit(tmp_path / "run") == []
    told = account(tmp_path / "run")
    assert told.used + told.dropped + told.lost + told.rolled_back == told.drawn
    assert told.counted == story.result.gradients


def test_what_people_see(tmp_path: Path, paceline: Commands) -> None:
    told = failed(tmp_path / "run", "async")
    shown = paceline("show", str(tmp_path / "run")).out
    assert "lost updates" in shown
    assert f"{told['gradients']:,}" in shown
    again = paceline("replay", str(tmp_path / "run"))
    assert f"the run has saved update {told['updates']}" in again.out.replace(",", "")
    assert again.out.rstrip().endswith("match")
    gradients = paceline("samples", str(tmp_path / "run")).out
    assert "rolled back" in gradients
