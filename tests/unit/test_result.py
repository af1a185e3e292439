"""What a run gives back."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline import simulate
from paceline.result import SHORT, Point, Result, Staleness, digest

FIELDS = {
    "scheme",
    "task",
    "workers",
    "updates",
    "gradients",
    "dropped",
    "samples",
    "virtual_seconds",
    "staleness",
    "metrics",
    "loss",
    "digest",
    "final",
    "seed",
    "batch",
    "hyper",
    "history",
    "warnings",
    "notice",
}


def result(**changed: Any) -> Result:
    made = Result(
        scheme="async",
        task="toy",
        workers=2,
        updates=3,
        gradients=4,
        samples=8,
        virtual_seconds=1.5,
        staleness=Staleness(0.5, 1, {0: 2, 1: 1}),
        metrics={"loss": 0.25},
        vector=torch.tensor([1.0, -2.0]),
    )
    return replace(made, **changed)


def test_the_digest_is_that_of_the_vectors_bytes_alone() -> None:
    vector = torch.tensor([1.0, -2.0])
    assert result().digest == digest(vector) == hashlib.sha256(vector.numpy().tobytes()).hexdigest()
    assert result(workers=7, task="other", seed=3, metrics={}).digest == digest(vector)
    assert result(vector=torch.tensor([1.0, 2.0])).digest != digest(vector)
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.arange(4.0)[::2]) == digest(torch.tensor([0.0, 2.0]))  # by value, not by where it lies


def test_json_has_the_promised_fields() -> None:
    plain = json.loads(result(history=[Point(1, 0.5, {"loss": 2.0})]).to_json())
    assert set(plain) >= FIELDS
    assert plain["staleness"]["histogram"] == {"0": 2, "1": 1}
    assert plain["history"][0] == {"update": 1, "seconds": 0.5, "loss": 2.0}
    assert plain["final"] == [1.0, -2.0]
    assert plain["loss"] == 0.25
    assert "\n" not in result().to_json()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_write_becomes_null(bad: float) -> None:
    odd = result(
        metrics={"loss": bad},
        vector=torch.tensor([bad, 1.0]),
        virtual_seconds=bad,
        history=[Point(1, bad, {"loss": bad})],
        hyper={"rates": (bad, 1.0)},
    )
    plain = json.loads(odd.to_json(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert plain["loss"] is None
    assert plain["metrics"] == {"loss": None}
    assert plain["final"] == [None, 1.0]
    assert plain["virtual_seconds"] is None
    assert plain["history"] == [{"update": 1, "seconds": None, "loss": None}]
    assert plain["hyper"] == {"rates": [None, 1.0]}


def test_only_a_short_vector_is_shown() -> None:
    assert SHORT == 16
    assert result(vector=torch.zeros(16)).final == [0.0] * 16
    assert result(vector=torch.zeros(17)).final is None
    assert json.loads(result(vector=torch.zeros(17)).to_json())["final"] is None


def test_without_a_loss_it_is_not_a_number() -> None:
    assert math.isnan(result(metrics={}).loss)


def test_a_result_of_a_run_stays_as_it_is() -> None:
    run = simulate("toy", "async", workers=2, steps=5, seed=3, lr=0.1)
    assert (run.scheme, run.task, run.workers, run.updates, run.seed, run.batch) == ("async", "toy", 2, 5, 3, 1)
    assert run.samples == run.gradients == 5
    assert run.hyper == {"lr": 0.1, "rule": "sgd"}
    assert run.staleness.histogram == {0: 1, 1: 4}
    assert run.staleness.mean == pytest.approx(0.8)
    assert json.loads(run.to_json())["final"] == run.vector.tolist()
    again = simulate("toy", "async", workers=2, steps=5, seed=3, lr=0.1)
    assert again.to_json() == run.to_json()
