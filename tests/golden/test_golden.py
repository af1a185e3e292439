"""Runs whose course a refactoring may not change: who updated the centre when, and how stale it was.

`python tests/golden/test_golden.py` writes the records anew; a change of theirs needs a reason in the commit message.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline import simulate
from paceline.config import discovery
from paceline.simulator.engine import SimulationEngine

RECORDS = Path(__file__).with_name("courses.json")
SETTING: dict[str, Any] = {
    "steps": 24,
    "seed": 7,
    "compute": "exponential:1.0",
    "network": "latency=0.01,bandwidth=1e4",
    "faults": ["kill:0@update=8,back=1.5"],
    "lr": 0.01,
}


def course(name: str) -> dict[str, Any]:
    """Times and callers of the updates, without any arithmetic of the vector in it."""
    updates: list[list[float]] = []

    def watch(engine: SimulationEngine) -> None:
        updates.append([round(engine.now, 9), engine.scheduler.ledger.caller if engine.scheduler else 0])

    workers = 1 if discovery.scheme(name).alone else 3
    result = simulate("quadratic", name, workers=workers, watch=watch, warn=lambda text: None, **SETTING)
    stale = {str(tau): count for tau, count in result.staleness.histogram.items()}
    return {"updates": updates, "gradients": result.gradients, "dropped": result.dropped, "staleness": stale}


def records() -> dict[str, Any]:
    known: dict[str, Any] = json.loads(RECORDS.read_text(encoding="utf-8")) if RECORDS.is_file() else {}
    return known


@pytest.mark.parametrize("name", list(records()))
def test_the_course_of_a_run_is_as_recorded(name: str) -> None:
    assert course(name) == records()[name]


if __name__ == "__main__":
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(course(name))}" for name in discovery.schemes())
    RECORDS.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
