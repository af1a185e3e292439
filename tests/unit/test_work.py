"""The length of a run in updates, samples or epochs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from paceline import TorchTask, simulate
from paceline.config import build, work
from paceline.config.plan import Plan
from paceline.config.validate import planned
from paceline.errors import UsageError
from paceline.scheme import Scheme

N, BATCH = 100, 4


def small() -> TorchTask:
    data = torch.arange(float(N))[:, None], torch.zeros(N, 1)
    return TorchTask(lambda: nn.Linear(1, 1), nn.functional.mse_loss, data, batch=BATCH)


@pytest.mark.parametrize(
    ("scheme", "hyper", "workers", "feed", "samples"),
    [
        ("sync", {}, 4, "shared", 16),
        ("sync", {}, 4, "slice", 4),
        ("sync", {"aggregate": 3}, 4, "shard", 12),
        ("async", {}, 4, "shared", 4),
        ("agn", {"window": 5}, 4, "shared", 20),
        ("averaging", {"window": 5}, 3, "shared", 60),
        ("sagn", {"window": 2}, 3, "slice", 8),
        ("groups", {"size": 2}, 3, "shared", 6),
        ("downpour", {"n_push": 3}, 2, "shared", 12),
    ],
)
def test_samples_of_an_update(scheme: str, hyper: dict[str, int], workers: int, feed: str, samples: int) -> None:
    made = build.scheme_of(scheme, hyper)
    assert work.samples_per_update(made, workers, BATCH, feed) == samples  # type: ignore[arg-type]


def test_updates_are_rounded_up() -> None:
    made = build.scheme_of("sync", {})
    assert [work.in_updates(made, 2, BATCH, "shared", N, samples=n) for n in (1, 8, 9, 16)] == [1, 1, 2, 2]
    assert [work.in_updates(made, 2, BATCH, "shared", N, epochs=n) for n in (0.5, 1, 2)] == [7, 13, 25]


def test_a_simulation_of_an_epoch_takes_every_sample() -> None:
    one = simulate(small(), "sync", workers=5, epochs=1, feed="shard", lr=0.0)
    assert (one.updates, one.samples, one.epochs) == (5, N, 1.0)
    other = simulate(small(), "async", workers=5, epochs=1, feed="shard", lr=0.0)
    assert other.updates == 25
    assert simulate(small(), "async", workers=1, samples=10, lr=0.0).updates == 3


def test_epochs_end_where_the_same_steps_end() -> None:
    by_epochs = simulate(small(), "averaging", workers=2, epochs=4, lr=1e-5)
    by_steps = simulate(small(), "averaging", workers=2, steps=by_epochs.updates, lr=1e-5)
    assert by_epochs.digest == by_steps.digest


def test_one_unit() -> None:
    with pytest.raises(UsageError, match=r"one unit: give one of samples, epochs"):
        simulate(small(), "sync", samples=8, epochs=1)
    with pytest.raises(UsageError, match=r"one unit: give one of steps, epochs"):
        simulate(small(), "sync", steps=8, epochs=1)
    with pytest.raises(UsageError, match=r"one unit: give one of steps, samples"):
        planned("toy", "sync", steps=8, samples=3)


def test_data_without_a_length_have_no_epochs() -> None:
    with pytest.raises(UsageError, match="the length of an epoch is not known here"):
        simulate("quadratic", "sync", epochs=1)


@dataclasses.dataclass(frozen=True)
class Moody(Scheme, name="moody"):
    """Does not say what an update takes."""


def test_a_scheme_that_does_not_say_refuses_samples() -> None:
    with pytest.raises(UsageError, match=r"moody does not say how many gradients.*give steps, or define"):
        simulate(small(), Moody, samples=10)


def test_a_plan_is_settled_in_updates() -> None:
    plan = Plan(task="mine", workers=2, epochs=2)
    assert work.settled(plan, build.scheme_of("async", {}), small()).steps == 50
    assert work.settled(Plan(steps=7), build.scheme_of("async", {}), small()).steps == 7


def test_another_unit_replaces_that_of_a_resumed_plan() -> None:
    before = Plan(steps=50, epochs=2.0)
    assert work.resumed(before, {"epochs": 4.0}) == Plan(epochs=4.0)
    assert work.resumed(before, {"steps": 60}) == Plan(steps=60)
    assert work.resumed(before, {"keep": 2}) == Plan(steps=50, epochs=2.0, keep=2)
    with pytest.raises(UsageError, match="one unit"):
        work.resumed(before, {"steps": 60, "samples": 4})
