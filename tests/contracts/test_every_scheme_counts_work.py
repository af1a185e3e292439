"""Samples and epochs are converted to updates by what a scheme says of its updates: it must be true."""

from __future__ import annotations

import pytest
from simulated_runs import BATCH, crew, engine, scheme_named

from paceline.config import work
from paceline.errors import UsageError

WORKERS = 4


@pytest.mark.parametrize("compute", ["constant:1.0", "exponential:1.0"])
def test_as_many_gradients_enter_an_update_as_the_scheme_says(name: str, compute: str) -> None:
    made, workers = scheme_named(name), crew(name, WORKERS)
    wanted = 1_500
    if made.gradients_per_update(workers) is None:  # a scheme need not say it
        with pytest.raises(UsageError, match="does not say how many gradients enter one update"):
            work.in_updates(made, workers, BATCH, "shared", None, samples=wanted)
        return
    updates = work.in_updates(made, workers, BATCH, "shared", None, samples=wanted)
    run = engine(name, workers=WORKERS, compute=compute, lr=1e-4)
    run.run(updates)
    # what is under way at the end is at most what the workers can hold at once
    held = workers * BATCH * max(1, getattr(made, "window", 1))
    refused = 0 if run.scheduler is None else run.scheduler.ledger.cells.refused * BATCH
    assert wanted - held <= run.samples - refused <= wanted + 2 * held
