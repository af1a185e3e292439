"""What `simulate` takes and refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from paceline import simulate
from paceline.errors import UsageError


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"workers": 0}, "workers must be at least 1, not 0"),
        ({"steps": 0}, "steps must be at least 1, not 0"),
        ({"seconds": 0.0}, "seconds must be above 0"),
        ({"seconds": math.nan}, "seconds must be above 0"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"quorum": "maybe"}, "quorum must be one of shrink, hold, not 'maybe'"),
        ({"feed": "spoon"}, "feed must be one of shared, shard, slice, not 'spoon'"),
        ({"speeds": [1.0]}, "1 speeds were given for 2 workers"),
        ({"links": ["5:0.1"]}, "a link was given for worker 5"),
        (
            {"aggregate": 3},
            "aggregate is 3, but 2 workers give one gradient each per update; lower aggregate, or use the",
        ),
        ({"aggregate": 0}, "aggregate must be at least 1"),
        ({"window": 3}, "no hyper-parameter of sync 'window'"),
    ],
)
def test_wrong_requests_are_refused_before_the_run(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        simulate("toy", "sync", **{"workers": 2, "steps": 3, **wrong})
    assert message in str(caught.value)


def test_a_window_of_0_is_refused() -> None:
    with pytest.raises(UsageError, match="downpour-easy: window must be at least 1, not 0"):
        simulate("toy", "downpour-easy", window=0)


def test_more_gradients_than_workers() -> None:
    result = simulate("toy", "sync-repeat", workers=2, steps=4, aggregate=3)
    assert result.updates == 4
    assert sum(result.staleness.histogram.values()) == 12


def test_seconds_end_a_run() -> None:
    result = simulate("toy", "async", workers=2, steps=1000, seconds=3.5, warn=lambda text: None)
    assert (result.updates, result.virtual_seconds) == (6, 3.5)


def test_the_history_has_a_point_every_so_many_updates() -> None:
    watched: list[int] = []
    result = simulate("toy", "async", workers=2, steps=7, every=3, lr=0.1, watch=lambda e: watched.append(e.updates))
    assert [point.update for point in result.history] == [3, 6]
    assert watched == list(range(1, 8))
    assert result.history[0].metrics["loss"] > result.history[1].metrics["loss"]


def test_crossing_a_limit_of_stability_warns() -> None:
    said: list[str] = []
    result = simulate("toy", "async", workers=8, steps=2, lr=0.4, warn=said.append)
    assert result.warnings == said
    assert "crosses" in said[0]
    with pytest.warns(UserWarning, match="crosses"):
        simulate("toy", "async", workers=8, steps=2, lr=0.4)


def test_threads_and_grad_mode_are_as_before() -> None:
    torch.set_num_threads(2)
    simulate("toy", "async", workers=2, steps=2, threads=1)
    assert torch.get_num_threads() == 2
    assert torch.is_grad_enabled()
