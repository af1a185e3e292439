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

CASES = [("ringmaster", {"threshold": 1}), ("malenia", {}), ("mindflayer", {"deadline": 0.001, "tries": 2})]
BATCH = 700  # gradients take long enough that many are under way when they become useless


def stopped(directory: Path) -> int:
    logs = place(directory, 1).glob("worker-*.log")
    return sum(record.kind == RecordKind.STOPPED for log in logs for record in order_log.read(log).records)


@pytest.mark.parametrize(("scheme", "hyper"), CASES)
def test_they_are_recorded_and_repeated(scheme: str, hyper: dict[str, Any], tmp_path: Path) -> None:
    kills = ["worker:1", "chief"]
    with leaving_nothing():
        story = run(tmp_path / "run", "digits-mlp", scheme, workers=3, steps=150, hyper=hyper, kills=kills, batch=BATCH)
    finished(story, 150)
    assert stopped(tmp_path / "run") > 0
    told = replay(tmp_path / "run")
    assert told.match, told.difference


def test_a_server_tells_workers_of_other_nodes(tmp_path: Path) -> None:
    with leaving_nothing(), nodes() as made:
        settings: dict[str, Any] = {"workers": 3, "steps": 600, "hyper": {"threshold": 1}, "batch": BATCH}
        story = run(tmp_path / "run", "digits-mlp", "ringmaster", launcher=made.launcher, **settings)
    finished(story, 600)
    assert stopped(tmp_path / "run") > 0
    assert replay(tmp_path / "run").match
