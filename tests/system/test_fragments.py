"""Fragments of a vector, by the layers of the model, exchanged between real processes beside their gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nodes import nodes
from processes import finished, leaving_nothing, run

from paceline import replay, simulate

SETTINGS: dict[str, Any] = {"workers": 2, "steps": 12, "seed": 3}


@pytest.mark.parametrize("collective", ["shared", "tcp", "gloo"])
@pytest.mark.parametrize(
    "hyper",
    [
        {"fragments": 2, "overlap": 3, "window": 8, "pattern": "sequential"},
        {"fragments": 1, "eager": True, "window": 6},
    ],
)
def test_they_have_the_simulators_bits_and_replay(hyper: dict[str, Any], collective: str, tmp_path: Path) -> None:
    story = run(tmp_path / "run", "digits-mlp", "streaming-diloco", hyper=hyper, collective=collective, **SETTINGS)
    result = finished(story, 12)
    assert result.digest == simulate("digits-mlp", "streaming-diloco", **SETTINGS, **hyper).digest
    assert replay(tmp_path / "run").match


@pytest.mark.parametrize(
    ("collective", "compress"),
    [("shared", "fp4:format=e3m0"), ("tcp", "fp4:format=e3m0"), ("shared", "topk:0.1"), ("tcp", "powersgd:2")],
)
def test_compressed_fragments(collective: str, compress: str, tmp_path: Path) -> None:
    hyper: dict[str, Any] = {"fragments": 2, "overlap": 3, "window": 8}
    given = {**SETTINGS, "compress": compress, "collective": collective}
    story = run(tmp_path / "run", "digits-mlp", "streaming-diloco", hyper=hyper, **given)
    told = simulate("digits-mlp", "streaming-diloco", **SETTINGS, compress=compress, **hyper)
    assert (
        finished(story, 12).digest
        == told.digest
        != simulate("digits-mlp", "streaming-diloco", **SETTINGS, **hyper).digest
    )
    assert replay(tmp_path / "run").match


def test_a_server_on_another_node_knows_which_fragment_a_payload_is(tmp_path: Path) -> None:
    hyper: dict[str, Any] = {"fragments": 2, "overlap": 1, "window": 4, "least": 2}
    with leaving_nothing(), nodes() as made:
        settings = {**SETTINGS, "compress": "powersgd:2", "launcher": made.launcher}
        story = run(tmp_path / "run", "digits-mlp", "decoupled-diloco", hyper=hyper, **settings)
    traffic = finished(story, 12).traffic
    assert traffic is not None
    assert sum(traffic["sent"]) < sum(traffic["uncompressed"])
    assert replay(tmp_path / "run").match


@pytest.mark.parametrize(
    ("scheme", "words"),
    [("streaming-diloco", {}), ("decoupled-diloco", {}), ("decoupled-diloco", {"average": "radial"})],
)
def test_a_killed_worker_keeps_the_errors_of_its_fragments(tmp_path: Path, scheme: str, words: dict[str, Any]) -> None:
    hyper = {"fragments": 2, "overlap": 1, "window": 3, **words}
    settings: dict[str, Any] = {"workers": 2, "steps": 150, "compress": "topk:0.05", "checkpoint_seconds": 0.25}
    story = run(tmp_path / "run", "digits-mlp", scheme, kills=("worker:1", "chief"), hyper=hyper, **settings)
    assert finished(story, 150).restarts == 2
    assert replay(tmp_path / "run").match


def test_a_worker_that_was_killed_joins_between_two_fragments(tmp_path: Path) -> None:
    hyper = {"fragments": 2, "overlap": 2, "window": 4}
    settings: dict[str, Any] = {"workers": 3, "steps": 150, "checkpoint_seconds": 0.25}
    kills = ("worker:1", "chief")
    story = run(tmp_path / "run", "digits-mlp", "streaming-diloco", kills=kills, hyper=hyper, **settings)
    assert finished(story, 150).restarts == 2
    assert replay(tmp_path / "run").match
