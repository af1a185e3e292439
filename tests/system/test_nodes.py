"""Training on several nodes: the bits of one machine, and every role killed. Data: scikit-learn's digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nodes import nodes
from processes import finished, leaving_nothing, run

from paceline.sim.run import simulate

TASK = "digits-mlp"


def digest(scheme: str, workers: int, steps: int, **settings: Any) -> str:
    return simulate(TASK, scheme, workers=workers, steps=steps, **settings.pop("hyper", {}), **settings).digest


@pytest.mark.parametrize(
    ("scheme", "settings"),
    [
        ("sync", {"workers": 3}),
        ("sync", {"workers": 2, "servers": 2}),
        ("sync", {"workers": 2, "servers": 3, "hyper": {"rule": "adam"}}),
        ("sagn", {"workers": 2}),
        ("async", {"workers": 1}),
        ("downpour", {"workers": 1}),
    ],
)
def test_the_bits_are_those_of_the_simulator(tmp_path: Path, scheme: str, settings: dict[str, Any]) -> None:
    with leaving_nothing(), nodes() as made:
        story = run(tmp_path / "run", TASK, scheme, steps=60, launcher=made.launcher, **settings)
    alike = {key: value for key, value in settings.items() if key != "servers"}
    assert finished(story, 60).digest == digest(scheme, alike.pop("workers"), 60, **alike)


@pytest.mark.parametrize("scheme", ["async", "agn", "dynsgd", "aeasgd", "hogwild", "sync-rates"])
def test_every_kind_of_scheme_with_a_server_trains(tmp_path: Path, scheme: str) -> None:
    with leaving_nothing(), nodes() as made:
        story = run(tmp_path / "run", TASK, scheme, steps=300, workers=2, launcher=made.launcher)
    assert finished(story, 300, over=8).metrics["accuracy"] > 0.5


@pytest.mark.parametrize("scheme", ["async", "sync"])
@pytest.mark.parametrize("victim", ["worker:1", "chief", "server:0"])
def test_a_killed_role_is_brought_back(tmp_path: Path, scheme: str, victim: str) -> None:
    with leaving_nothing(), nodes() as made:
        story = run(
            tmp_path / "run",
            TASK,
            scheme,
            steps=600,
            workers=2,
            checkpoint_steps=50,
            kills=[victim] * 2,
            launcher=made.launcher,
        )
    finished(story, 600, over=2)
