"""`simulate` warns when values cross a known limit of stability, and is silent below (here warnings are errors)."""

from __future__ import annotations

import re
from typing import Any

import pytest
from oracles import line, run

from paceline import StabilityWarning, UsageError, simulate, stability


def says(name: str, workers: int, **options: Any) -> list[str]:
    """Two updates, without `warn`: what was said has to be a StabilityWarning."""
    return simulate(line(), name, workers=workers, steps=2, **options).warnings


def crosses(name: str, workers: int, limit: float, *words: str, rate: str = "lr", **options: Any) -> None:
    """Silent just below the limit; just above it the warning names what is crossed, and the result keeps it."""
    assert says(name, workers, **{rate: 0.999 * limit}, **options) == []
    with pytest.warns(StabilityWarning, match=re.escape(words[0])) as caught:
        said = says(name, workers, **{rate: 1.001 * limit}, **options)
    assert [str(one.message) for one in caught] == said
    assert all(word in said[0] for word in words), said
    assert len(said) == 1


@pytest.mark.parametrize(
    ("name", "workers"), [("sgd", 1), ("sync", 4), ("allreduce", 4), ("averaging", 4), ("easgd", 4)]
)
def test_synchronous_sgd_names_two(name: str, workers: int) -> None:
    hyper = {"beta": 0.0} if name == "easgd" else {}
    crosses(name, workers, 2.0, "crosses 2", "synchronous SGD", **hyper)


def test_sagn_is_held_to_the_gain_of_its_window() -> None:
    """(1 - (1 - c)^window) / window reaches 2 at c = 1 + 9^(1/5) for a window of 5: later than plain SGD."""
    crosses("sagn", 4, 2.0, "crosses 2", window=1)
    crosses("sagn", 4, 1 + 9**0.2, "crosses 2", "gain of a window of 5", window=5)


def test_different_data_at_different_speeds_are_named() -> None:
    hyper = {"task_options": {"dim": 2, "heterogeneity": 1.0}, "workers": 2, "steps": 2, "lr": 0.01}
    with pytest.warns(StabilityWarning, match="favour the fast"):
        simulate("quadratic", "async", speeds=(1, 2), **hyper)
    assert simulate("quadratic", "async", speeds=(2, 2), **hyper).warnings == []
    assert simulate("quadratic", "sync", speeds=(1, 2), **hyper).warnings == []


def test_a_sum_over_the_workers_counts_as_many_times() -> None:
    crosses("sync", 4, 2.0 / 4, "crosses 2", reduce="sum")
    crosses("sync-rates", 4, 2.0 / 4, "crosses 2")
    crosses("sync-rates", 4, 2.0, "crosses 2", reduce="mean")


def test_rates_of_their_own_add_up() -> None:
    assert says("sync-rates", 3, rates=(0.9, 0.9, 0.1)) == []
    with pytest.warns(StabilityWarning, match="crosses 2"):
        says("sync-rates", 3, rates=(0.9, 0.9, 0.3))


@pytest.mark.parametrize("workers", [1, 2, 4, 10])
@pytest.mark.parametrize("name", ["async", "hogwild"])
def test_asynchronous_workers_name_their_delays_limit(name: str, workers: int) -> None:
    limit = stability.constant_delay(workers - 1)
    random = f"exponential times: {stability.exponential_workers(workers):.3g}"
    crosses(name, workers, limit, f"crosses {limit:.3g}", f"{workers} asynchronous workers in turn", random)


def test_groups_count_as_workers() -> None:
    crosses("groups", 6, stability.constant_delay(1), "crosses 1", "2 asynchronous workers", size=3)


@pytest.mark.parametrize("window", [1, 5, 20])
@pytest.mark.parametrize("name", ["downpour-easy", "downpour", "adag"])
def test_a_window_is_held_to_its_gain(name: str, window: int) -> None:
    hyper = {"window": window} | ({"server.rule": "sgd"} if name == "downpour" else {})
    limit = 1 - (1 - stability.constant_delay(9)) ** (1 / window)
    crosses(name, 10, limit, "crosses 0.165", f"gain of a window of {window} =", **hyper)


@pytest.mark.parametrize(("name", "hyper"), [("agn", {}), ("adag", {"normalise": True})])
def test_a_normalised_window_bears_more(name: str, hyper: dict[str, Any]) -> None:
    limit = 1 - (1 - 5 * stability.constant_delay(9)) ** (1 / 5)
    crosses(name, 10, limit, "crosses 0.165", "gain of a window of 5", window=5, **hyper)
    assert says(name, 10, lr=1.0, window=7, **hyper) == []


def test_dynsgd_is_held_to_what_its_weights_settle_at() -> None:
    crosses("dynsgd", 4, 4 * stability.constant_delay(3), "crosses 0.445", "settled gain", window=1)
    crosses("dynsgd", 1, 2.0, "crosses 2", window=1)


@pytest.mark.parametrize("name", ["downpour-easy", "agn", "dynsgd", "sagn"])
def test_local_steps_that_diverge_by_themselves_are_named_for_even_windows_too(name: str) -> None:
    """(1 - c)^2 is above 1 for c above 2: the gain is negative, which is no smaller evil."""
    with pytest.warns(StabilityWarning, match=r"diverge"):
        says(name, 1, lr=2.5, window=2)
    assert says(name, 1, lr=0.0, window=2) == []


@pytest.mark.parametrize("workers", [1, 4, 16])
def test_easgd_names_its_beta(workers: int) -> None:
    limit = stability.easgd_beta(1.7, workers)
    below = simulate(line(), "easgd", workers=workers, steps=2, lr=1.7, beta=0.999 * limit, warn=lambda text: None)
    assert not any("crosses" in text for text in below.warnings)
    with pytest.warns(StabilityWarning, match=f"crosses {limit:.3g}, the stability limit of easgd"):
        says("easgd", workers, lr=1.7, beta=1.001 * limit)


def test_easgd_above_one_overshoots_and_at_two_is_refused() -> None:
    assert says("easgd", 4, beta=1.0) == []
    with pytest.warns(StabilityWarning, match="above 1"):
        says("easgd", 4, beta=1.01)
    with pytest.raises(UsageError, match="below 2"):
        says("easgd", 4, beta=2.0)
    with pytest.raises(UsageError, match="below 2"):
        says("easgd", 4, alpha=0.5)
    assert says("easgd", 4, alpha=0.2) == []


@pytest.mark.parametrize("name", ["aeasgd", "aeamsgd"])
def test_aeasgd_names_its_alpha(name: str) -> None:
    crosses(name, 4, stability.aeasgd_alpha(1.0), "crosses 0.667", "alpha", rate="alpha", lr=1.0)


@pytest.mark.parametrize("rule", ["momentum", "nesterov"])
@pytest.mark.parametrize(
    ("name", "key"),
    [("async", "rule"), ("hogwild", "rule"), ("downpour", "server.rule"), ("agn", "server.rule")],
)
def test_much_momentum_with_many_asynchronous_workers_is_too_much(name: str, key: str, rule: str) -> None:
    option = f"{key.removesuffix('rule')}momentum" if key != "rule" else "rule.momentum"
    assert says(name, 4, lr=1e-3, **{key: rule}) == []
    assert says(name, 5, lr=1e-3, **{key: rule, option: 0.89}) == []
    with pytest.warns(StabilityWarning, match=r"momentum 0.9 with 5 asynchronous workers: .* implicit momentum of 0.8"):
        says(name, 5, lr=1e-3, **{key: rule})


def test_momentum_is_counted_between_groups_and_is_no_matter_in_synchrony() -> None:
    assert says("groups", 8, lr=1e-3, rule="momentum", size=2) == []
    with pytest.warns(StabilityWarning, match="with 5 asynchronous workers"):
        says("groups", 10, lr=1e-3, rule="momentum", size=2)
    assert says("sync", 10, lr=1e-3, rule="momentum") == []


def test_a_fresh_push_of_a_whole_window_has_full_weight_in_dynsgd() -> None:
    for quiet in ({"window": 1}, {"window": 5, "weight": "constant"}):
        assert says("dynsgd", 9, lr=1e-3, **quiet) == []
    assert says("dynsgd", 8, lr=1e-3, window=5) == []
    with pytest.warns(StabilityWarning, match="window 5 with 9 workers"):
        says("dynsgd", 9, lr=1e-3, window=5)


def test_the_curvature_may_be_given_and_warnings_may_be_taken() -> None:
    heard: list[str] = []
    result = simulate("toy", "sync", workers=2, steps=2, lr=0.3, curvature=10, warn=heard.append)
    assert heard == result.warnings
    assert "lr * curvature = 3" in heard[0]
    assert run("toy", "sync", 2, 2, lr=0.3).warnings == []
    assert "crosses 2" in run("toy", "sync", 2, 2, lr=1.0).warnings[0]
