"""A fixed slice of the simulated chaos, and proof that it can fail. All of it: `make chaos-sim`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import simulated
from simulated_mutations import MUTATIONS, SERVERLESS

SLICE = 40
ENOUGH = 600  # seeds within which every mutation is found


@pytest.mark.parametrize("first", range(0, 400, SLICE))
def test_every_law_holds_under_random_faults(first: int) -> None:
    counts, failures = simulated.judged(range(first, first + SLICE))
    assert not failures, "\n".join(map(str, failures))
    assert counts["runs"] == SLICE
    assert counts["kill worker"]
    assert counts["kill server"]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_what_is_broken_on_purpose_is_found(mutation: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch.setattr)
    cases = (simulated.case(seed, serverless=mutation in SERVERLESS) for seed in range(ENOUGH))
    assert any(simulated.broken(case, repeat=True) for case in cases)
