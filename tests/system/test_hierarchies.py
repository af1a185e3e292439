"""Groups of groups, and gossip between windows, in real processes: the bits of the simulator, deaths, replay.

Data: scikit-learn's digits.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from processes import Linger, Story, finished, leaving_nothing, run

from paceline import replay, simulate
from paceline.processes.supervisor.status import Status

STEPS = 240
CASES: dict[str, dict[str, Any]] = {
    "daso": {"size": 2, "skip": 4, "wait": 2},
    "hierarchical": {"sizes": (2,), "windows": (2, 4)},
    "noloco": {"rule": "sgd", "lr": 0.1, "window": 2},
}
each_scheme = pytest.mark.parametrize("scheme", CASES)
each_way = pytest.mark.parametrize("collective", ["shared", "tcp"])


def trained(directory: Path, scheme: str, steps: int = STEPS, **settings: Any) -> Story:
    chosen = {"workers": 4, "steps": steps, "hyper": CASES[scheme], "summaries": False} | settings
    with leaving_nothing():
        return run(directory, "digits-mlp", scheme, **chosen)


def repeated(directory: Path, digest: str) -> None:
    told = replay(directory)
    assert told.match, told.difference
    assert told.digest == digest


@each_way
@each_scheme
def test_a_run_has_the_bits_of_the_simulator(scheme: str, collective: str, tmp_path: Path) -> None:
    result = finished(trained(tmp_path / "run", scheme, 40, collective=collective), 40)
    assert result.digest == simulate("digits-mlp", scheme, workers=4, steps=40, **CASES[scheme]).digest
    repeated(tmp_path / "run", result.digest)


@pytest.mark.parametrize("quorum", ["shrink", "hold"])
@each_way
@each_scheme
def test_killed_workers_join_again(scheme: str, collective: str, quorum: str, tmp_path: Path) -> None:
    kills = ["worker:1", "chief", "worker:3", "worker:2"]
    story = trained(tmp_path / "run", scheme, kills=kills, quorum=quorum, collective=collective)
    result = finished(story, STEPS)
    assert result.restarts == len(kills)
    assert result.metrics["accuracy"] > 0.8
    repeated(tmp_path / "run", result.digest)


@each_way
@each_scheme
def test_a_whole_group_is_killed_at_once(scheme: str, collective: str, tmp_path: Path) -> None:
    killed: list[int] = []
    gate = tmp_path / "gate"

    def strike(status: Status) -> None:
        roles = [role for role in status.roles if role.name in ("worker:2", "worker:3")]
        if not killed and status.updates >= 30:
            killed.extend(role.pid for role in roles)
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        if killed and all(role.pid not in (0, *killed) and role.state == "training" for role in roles):
            gate.touch()

    hooks = [Linger(gate, STEPS - 20)]
    story = trained(tmp_path / "run", scheme, watch=strike, hooks=hooks, collective=collective)
    result = finished(story, STEPS)
    assert result.restarts == 2
    assert story.steps["worker:2"] == story.steps["worker:3"] == STEPS  # they were back before the end
    repeated(tmp_path / "run", result.digest)
