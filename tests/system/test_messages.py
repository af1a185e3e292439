"""Messages between real processes: whichever role is killed, at any moment, nothing that was sent is lost or counted
twice; replay gives the bits; a resumed run has what was under way.

Data: scikit-learn's digits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from in_step import InStep
from message_runs import ANY, TOSSING, WORKERS, check_replay, checkpoints, states, weight
from processes import finished, leaving_nothing, run

from paceline.errors import UsageError
from paceline.result import digest
from paceline.runs.replay.replay import replay
from paceline.runtime.messages import under_way


def test_killed_at_any_place_of_a_step_nothing_is_lost_or_counted_twice(tmp_path: Path) -> None:
    """The chief and a worker, between receiving and keeping, and between sending and giving away."""
    file = tmp_path / "tossing.py"
    file.write_text(TOSSING, encoding="utf-8")
    with leaving_nothing():
        story = run(
            tmp_path / "run", "digits-mlp", f"{file}:Tossing", workers=WORKERS, steps=150, checkpoint_steps=10, keep=100
        )
    result = finished(story, 150)
    assert result.restarts == 5
    assert result.rolled_back_updates == 0
    saved = checkpoints(tmp_path / "run")
    assert [one.step for one in saved][-1] == 150
    for one in saved:
        workers, messages = states(one), under_way(states(one))
        assert weight(one) == pytest.approx(WORKERS, rel=1e-12)
        assert sum(w.sent for w in workers) == sum(w.came for w in workers) + len(messages)
    check_replay(tmp_path / "run", result.digest)


@pytest.mark.parametrize(("scheme", "hyper"), [("gosgd", {"p": 0.7}), ("ad-psgd", {})])
def test_the_schemes_survive_kills_and_are_replayed(scheme: str, hyper: dict[str, Any], tmp_path: Path) -> None:
    kills, steps = ["worker:1", "chief", "worker:2"], 150
    settings: dict[str, Any] = {"workers": WORKERS, "steps": steps, "checkpoint_steps": 30, "keep": 100}
    with leaving_nothing():
        story = run(tmp_path / "run", "digits-mlp", scheme, kills=kills, hyper=ANY | hyper, **settings)
    result = finished(story, steps)
    assert result.restarts == len(kills)
    assert not story.falls
    assert result.metrics["accuracy"] > 0.8
    if scheme == "gosgd":
        weights = [weight(one) for one in checkpoints(tmp_path / "run")]
        assert weights == pytest.approx([WORKERS] * len(weights), rel=1e-12)
    check_replay(tmp_path / "run", result.digest)


def test_a_replay_stops_at_an_update(tmp_path: Path) -> None:
    """Workers may have received messages that others sent later: the model is that of the checkpoint all the same."""
    settings: dict[str, Any] = {"workers": WORKERS, "steps": 120, "checkpoint_steps": 20, "keep": 100}
    finished(run(tmp_path / "run", "digits-mlp", "gosgd", hyper=ANY | {"p": 0.8}, **settings), 120)
    for saved in checkpoints(tmp_path / "run")[1:]:
        assert replay(tmp_path / "run", until=saved.step).digest == digest(saved.tensors["model"])


def test_a_resumed_run_has_what_was_under_way(tmp_path: Path) -> None:
    file, place = tmp_path / "tossing.py", tmp_path / "run"
    file.write_text(TOSSING, encoding="utf-8")
    for name in ("received-0", "halved-1", "sent-0", "taken-1", "counted-0"):
        (tmp_path / name).touch()  # nobody is killed
    words: dict[str, Any] = {"hyper": {"deaf": 30}, "workers": WORKERS}
    hooks = [InStep(str(tmp_path), WORKERS)]  # nothing can be sent to a worker that has ended
    finished(run(place, "digits-mlp", f"{file}:Tossing", steps=20, hooks=hooks, **words), 20)
    (before,) = [one for one in checkpoints(place) if one.step == 20]
    assert [(to, message.sender) for to, message in under_way(states(before)) if to == 1] == [(1, 0)] * 4
    assert weight(before) == pytest.approx(WORKERS, rel=1e-12)
    again = finished(run(place, "digits-mlp", f"{file}:Tossing", steps=60, resume=True, launch=2, **words), 60)
    (after,) = [one for one in checkpoints(place) if one.step == 60]
    assert states(after)[1].came >= 4
    assert weight(after) == pytest.approx(WORKERS, rel=1e-12)
    check_replay(place, again.digest)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"collective": "gloo"}, "do not go over connections of gloo; use --collective tcp"),
        ({"device": "cuda"}, "in the memory of the host, not of cuda; use --device cpu"),
        (
            {"exact": True},
            "cannot be exact: a message is received at any step of its receiver; gosgd partner=same",
        ),
    ],
)
def test_where_messages_cannot_be_had_the_run_is_refused(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=reason):
        run(tmp_path / "run", "digits-mlp", "gosgd", hyper=ANY, steps=5, **{"workers": 2} | settings)
