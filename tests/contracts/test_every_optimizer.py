"""Every rule under every scheme with that side: it trains, is killed, returns to a checkpoint, and repeats.

The other pairs are in tests/matrix: `make matrix`.
"""

from __future__ import annotations

import math

import optimizer_runs
import pytest
from optimizer_runs import ALIKE, EXACT, FEW, LOCAL, ONCE, OWN, SERVED, pairs, run

from paceline.config import discovery
from paceline.errors import UsageError
from paceline.rules import rules


def test_every_scheme_is_in_a_row() -> None:
    assert set(discovery.schemes()) == {*SERVED, *LOCAL, *ALIKE, *FEW, *OWN, *ONCE}


@pytest.mark.parametrize(("scheme", "rule"), pairs(SERVED + LOCAL + ALIKE, quick=True))
def test_it_trains_and_repeats_after_deaths(scheme: str, rule: str) -> None:
    optimizer_runs.trains_and_repeats_after_deaths(scheme, rule)


@pytest.mark.long
@pytest.mark.parametrize("scheme", ONCE)
def test_it_trains_with_an_optimizer_of_torch(scheme: str) -> None:
    optimizer_runs.trains_and_repeats_after_deaths(scheme, "nadam")


@pytest.mark.parametrize("scheme", OWN)
def test_schemes_with_an_update_of_their_own_take_no_rule(scheme: str) -> None:
    with pytest.raises(UsageError, match="no hyper-parameter"):
        run(scheme, "sgd")


@pytest.mark.parametrize(("scheme", "rule"), pairs(EXACT, quick=True))
def test_a_death_changes_no_bit_of_an_exact_run(scheme: str, rule: str) -> None:
    optimizer_runs.a_death_changes_no_bit_of_an_exact_run(scheme, rule)


@pytest.mark.parametrize("rule", sorted(rules()))
@pytest.mark.parametrize("scheme", FEW)
def test_schemes_that_take_few_rules_say_so(scheme: str, rule: str) -> None:
    takes = {
        "hogwild": {name for name, one in rules().items() if one.prepared},
        "aeamsgd": {"sgd"},
        "sync-rates": {"sgd", "momentum", "nesterov"},
        "gap-aware": {"sgd", "momentum", "nesterov"},
        "rescaled": {"sgd", "momentum", "nesterov"},
    }
    if rule in takes[scheme]:
        assert math.isfinite(run(scheme, rule, lr=0.01).loss)
    else:
        with pytest.raises(UsageError, match=rule):
            run(scheme, rule)
