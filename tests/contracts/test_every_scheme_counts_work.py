"""Samples and epochs are converted to updates by what a scheme says of its updates: it must be true."""

from __future__ import annotations

import pytest
from simulated_runs import BATCH, crew, engine, scheme_named

from paceline.compute_times import parse_times
from paceline.config import work
from paceline.errors import UsageError
from paceline.simulator.cost import Cost, NetworkLink
from paceline.simulator.engine import SimulationEngine
from paceline.tasks.quadratic import quadratic

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


class Weighed(Cost):
    """A network that notes how many bytes cross it."""

    bytes = 0

    def message(self, rank: int, size: int) -> float:
        Weighed.bytes += size
        return super().message(rank, size)


def test_the_network_carries_the_vectors_that_the_catalogue_says(name: str) -> None:
    """`volume`, by the bytes of the simulator's messages: what a worker sends and receives per gradient."""
    made, workers, length = scheme_named(name), crew(name, WORKERS), 500
    if any(not method.atomic for method in made.methods.values()):
        assert made.vectors_per_gradient(workers) == 2  # it reads and writes the vector in pieces, without messages
        return
    Weighed.bytes = 0
    cost = Weighed(parse_times("exponential:1.0"), NetworkLink(latency=1e-6))
    run = SimulationEngine(quadratic(dim=length), made, workers=workers, seed=1, cost=cost)
    run.run(max(16, int(192 / (made.gradients_per_update(workers) or 1))))
    vectors = Weighed.bytes / (4 * length)
    expected = made.vectors_per_gradient(workers) * run.gradients + run.stops.count  # a pull that no push followed
    held = 4 * workers  # what is under way at the end, and counters beside the vectors
    assert abs(vectors - expected) <= held + 0.02 * vectors
