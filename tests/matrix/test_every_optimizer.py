"""Every rule under every scheme with that side: the pairs that tests/contracts/test_every_optimizer.py omits.

`make matrix`. Schemes and rules are found, not listed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "contracts"))

import optimizer_runs
from optimizer_runs import EXACT, pairs, rules, with_side

from paceline.errors import UsageError

# a fragment is a flat vector, and of a small model some are empty: Muon needs matrices, Adafactor divides by a length
NO_FRAGMENTS = {("decoupled-diloco", "muon"), ("decoupled-diloco", "adafactor")}


@pytest.mark.parametrize(("scheme", "rule"), pairs(with_side("rule"), quick=False))
def test_it_trains_and_repeats_after_deaths(scheme: str, rule: str) -> None:
    optimizer_runs.trains_and_repeats_after_deaths(scheme, rule)


@pytest.mark.parametrize("rule", sorted(rules()))
@pytest.mark.parametrize("scheme", with_side("server_rule"))
def test_it_trains_with_any_rule_of_the_server(scheme: str, rule: str) -> None:
    optimizer_runs.trains_and_repeats_after_deaths(scheme, rule, "server_rule")


@pytest.mark.parametrize("rule", sorted(rules()))
@pytest.mark.parametrize("scheme", with_side("outer"))
def test_it_trains_with_any_outer_rule(scheme: str, rule: str) -> None:
    if (scheme, rule) in NO_FRAGMENTS:
        with pytest.raises(UsageError, match=f"(?i){rule}"):
            optimizer_runs.run(scheme, rule, "outer")
    else:
        optimizer_runs.trains_and_repeats_after_deaths(scheme, rule, "outer")


@pytest.mark.parametrize(("scheme", "rule"), pairs(EXACT, quick=False))
def test_a_death_changes_no_bit_of_an_exact_run(scheme: str, rule: str) -> None:
    optimizer_runs.a_death_changes_no_bit_of_an_exact_run(scheme, rule)
