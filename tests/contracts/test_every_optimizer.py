"""Every rule under every scheme with that side: it trains, is killed, returns to a checkpoint, and repeats.

The other pairs are in tests/matrix: `make matrix`.
"""

from __future__ import annotations

import math

import optimizer_runs
import pytest
from optimizer_runs import EXACT, FEW, ONE, QUICK, pairs, run, sides, with_side

from paceline.config import discovery
from paceline.errors import UsageError
from paceline.rules import rules

WITHOUT_RULE = ("dana", "ormo")  # have an update of their own


def test_the_matrix_has_every_side_of_every_scheme() -> None:
    """Schemes are found, not listed; those without a rule, and sides with a name of their own, are told here."""
    found = {scheme: sides(scheme) for scheme in discovery.schemes()}
    assert {scheme for scheme, having in found.items() if not having} == set(WITHOUT_RULE)
    assert {side for having in found.values() for side in having} == {"rule", "server_rule", "outer"}
    assert {*with_side("rule"), *FEW, *WITHOUT_RULE} == set(found)


@pytest.mark.parametrize(("scheme", "rule"), pairs(with_side("rule"), quick=True))
def test_it_trains_and_repeats_after_deaths(scheme: str, rule: str) -> None:
    optimizer_runs.trains_and_repeats_after_deaths(scheme, rule)


@pytest.mark.long
@pytest.mark.parametrize("scheme", sorted(set(with_side("rule")) - set(QUICK)))
def test_it_trains_with_an_optimizer_of_torch(scheme: str) -> None:
    optimizer_runs.trains_and_repeats_after_deaths(scheme, ONE)


@pytest.mark.parametrize("scheme", WITHOUT_RULE)
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
