"""Values given from Python are held to the same types and bounds as those of the command line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import paceline
from paceline import StabilityWarning, simulate
from paceline.errors import UsageError
from paceline.fields import Bound
from paceline.rules import SGD, Adam
from paceline.schemes.adag import ADAG
from paceline.schemes.sync import SyncSGD
from paceline.schemes.sync_rates import SyncRates


@pytest.mark.parametrize(
    ("hyper", "said"),
    [
        ({"reduce": "max"}, "reduce must be one of mean, sum"),
        ({"lr": "a"}, "lr must be a number"),
        ({"aggregate": 2.5}, "aggregate must be a whole number"),
        ({"lr": float("inf")}, "lr must be a finite number"),
        ({"lr": float("nan")}, "lr must be"),
    ],
)
def test_a_scheme_checks_what_it_is_made_of(hyper: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        SyncSGD(**hyper)


def test_a_switch_is_true_or_false() -> None:
    assert ADAG(normalise="no").normalise is False  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="normalise must be true or false"):
        ADAG(normalise="perhaps")  # type: ignore[arg-type]


def test_texts_numpy_numbers_and_classes_become_what_is_meant() -> None:
    scheme = SyncSGD(lr=np.float32(0.5), aggregate=np.int64(2), rule=Adam)  # type: ignore[arg-type]
    assert (scheme.lr, scheme.aggregate, scheme.rule) == (0.5, 2, Adam())
    assert type(scheme.lr) is float


def test_a_rule_refuses_rates_that_are_not_finite() -> None:
    with pytest.raises(UsageError, match="lr must be a finite number"):
        SGD(lr=float("inf"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 2.5}, "workers must be a whole number"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"steps": "many"}, "steps must be a whole number"),
        ({"every": -3}, "every must be at least 0"),
        ({"seconds": 0}, "seconds must be above 0"),
        ({"curvature": -5}, "curvature must be at least 0"),
        ({"curvature": float("nan")}, "curvature must be at least 0"),
        ({"speeds": "fast"}, "speeds must be a number"),
        ({"access": "nan"}, "at least 0"),
        ({"faults": "kil:1"}, "'kil:1' is not a fault"),
        ({"hooks": "lgo"}, "no hook 'lgo'"),
    ],
)
def test_simulate_checks_its_own_arguments(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        simulate("toy", "sync", **options)


def test_one_fault_or_number_need_no_list() -> None:
    result = simulate("toy", "sync", workers="3", steps=3, compute=2.0, faults="kill:1@step=1", hooks="log")
    assert (result.workers, result.updates, result.virtual_seconds) == (3, 3, 6.0)


def test_warnings_go_by_the_rate_in_use() -> None:
    for name, hyper in [
        ("sync", {"rule.lr": 5}),
        ("async", {"rule.lr": 0.5}),
        ("hogwild", {"server.lr": 0.5}),
        ("agn", {"server.lr": 5, "window": 2}),
        ("sagn", {"server.lr": 40}),
        ("aeasgd", {"rule.lr": 2, "window": 1}),
    ]:
        with pytest.warns(StabilityWarning, match="crosses"):
            simulate("toy", name, workers=4, steps=1, **hyper)
    assert simulate("toy", "async", workers=4, steps=1, lr=9.0, **{"rule.lr": 0.1}).warnings == []


def test_server_words_are_for_rules_at_the_server() -> None:
    same = [simulate("toy", "sync", steps=3, **{key: "adam"}).digest for key in ("rule", "server.rule")]
    assert same[0] == same[1]
    for name in ("aeasgd", "allreduce", "sgd", "easgd", "averaging"):
        with pytest.raises(UsageError, match="no hyper-parameter"):
            simulate("toy", name, **{"server.rule": "adam"})
    with pytest.raises(UsageError, match="mean the same here"):
        simulate("toy", "sync", rule="sgd", **{"server.rule": "adam"})


def test_rates_per_worker_leave_no_room_for_another() -> None:
    with pytest.raises(UsageError, match="omit those"):
        simulate("toy", SyncRates(rates=(0.1, 0.2), rule=SGD(lr=0.01)), workers=2)
    result = paceline.simulate("toy", "sync-rates", rates=(0.1, 0.2, 0.05), workers=3, steps=1)
    assert result.final == pytest.approx([35.0] * 4)


def test_a_task_that_needs_an_argument_says_which(tmp_path: Any) -> None:
    (tmp_path / "needs.py").write_text(
        "from paceline.tasks.quadratic import quadratic\ndef task(size: int):\n    return quadratic(dim=size)\n",
        encoding="utf-8",
    )
    name = f"{tmp_path / 'needs.py'}:task"
    with pytest.raises(UsageError, match=r"needs size: give it as task\.size=VALUE"):
        simulate(name, "sync")
    assert simulate(name, "sync", steps=1, task_options={"size": "3"}).vector.numel() == 3


@pytest.mark.parametrize(
    ("bound", "words"), [(Bound(0, above=True), "above 0"), (Bound(0, 1, above=True), "above 0 and at most 1")]
)
def test_a_bound_says_both_of_its_ends(bound: Bound, words: str) -> None:
    assert str(bound) == words
