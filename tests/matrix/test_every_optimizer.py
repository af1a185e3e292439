"""Every rule under every scheme with that side: the pairs that tests/contracts/test_every_optimizer.py omits.

About four minutes of processor time: `make matrix`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "contracts"))

import optimizer_runs
from optimizer_runs import ALIKE, EXACT, LOCAL, SERVED, pairs


@pytest.mark.parametrize(("scheme", "rule"), pairs(SERVED + LOCAL + ALIKE, quick=False))
def test_it_trains_and_repeats_after_deaths(scheme: str, rule: str) -> None:
    optimizer_runs.trains_and_repeats_after_deaths(scheme, rule)


@pytest.mark.parametrize(("scheme", "rule"), pairs(EXACT, quick=False))
def test_a_death_changes_no_bit_of_an_exact_run(scheme: str, rule: str) -> None:
    optimizer_runs.a_death_changes_no_bit_of_an_exact_run(scheme, rule)
