"""Gradients that are stopped in real processes, on one machine and on several nodes, and their replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nodes import nodes
from processes import finished, leaving_nothing, run

from paceline import replay
from paceline.runs import order_log
from paceline.runs.order_log import RecordKind, place

CASES = [("ringmaster", {"threshold": 1}), ("malenia", {}), ("mindflayer", {"deadline": 0.004, "tries": 2})]


def stopped(directory: Path) -> int:
    logs = place(directory, 1).glob("worker-*.log")
    return sum(record.kind == RecordKind.STOPPED for log in logs for record in order_log.read(log).records)


@pytest.mark.parametrize(("scheme", "hyper"), CASES)
def test_they_are_recorded_and_repeated(scheme: str, hyper: dict[str, Any], tmp_path: Path) -> None:
    kills = ["worker:1", "chief"]
    with leaving_nothing():
        story = run(tmp_path / "run", "digits-mlp", scheme, workers=3, steps=150, hyper=hyper, kills=kills)
    finished(story, 150)
    assert stopped(tmp_path / "run") > 0
    told = replay(tmp_path / "run")
    assert told.match, told.difference


def test_a_server_tells_workers_of_other_nodes(tmp_path: Path) -> None:
    with leaving_nothing(), nodes() as made:
        hyper = {"threshold": 1}
        story = run(
            tmp_path / "run", "digits-mlp", "ringmaster", workers=2, steps=300, hyper=hyper, launcher=made.launcher
        )
    finished(story, 300)
    assert stopped(tmp_path / "run") > 0
    assert replay(tmp_path / "run").match
