"""Samples and epochs are converted to updates by what a scheme says of its updates: it must be true."""

from __future__ import annotations

from fractions import Fraction

import pytest
from simulated_runs import BATCH, crew, engine, scheme_named

from paceline.compute_times import parse_times
from paceline.config import work
from paceline.errors import UsageError
from paceline.schemes.gosgd import GoSGD
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


STEPS, LENGTHS = 60, (200, 1000)  # a multiple of all windows; vectors of which the numbers beside them are told apart
ALIKE = {"decoupled-diloco": {"least": WORKERS}}  # a fragment is fetched only if it is new: all compute alike


def counted(name: str, length: int) -> SimulationEngine:
    """A run that stops between two steps of all workers."""
    compute = parse_times("constant:1.0" if name in ALIKE else "exponential:1.0")
    made = scheme_named(name, **ALIKE.get(name, {}))
    run = SimulationEngine(quadratic(dim=length), made, workers=crew(name, WORKERS), seed=1, cost=Cost(compute))
    run.run(park_at=STEPS)
    return run


def test_a_worker_counts_exactly_the_bytes_that_the_catalogue_says(name: str) -> None:
    """`volume` times the gradients of each worker, to the byte. Runs of two lengths have the same course: what differs
    are the vectors, and the rest are numbers of 8 bytes."""
    runs = [counted(name, length) for length in LENGTHS]
    scheme, workers = runs[0].scheme, len(runs[0].seats)
    volume = Fraction(scheme.vectors_per_gradient(workers)).limit_denominator(10_000)
    for rank in range(workers):
        seats = [run.seats[rank] for run in runs]
        short, long = (seat.driver.traffic.sent + seat.driver.traffic.received for seat in seats)
        gradients, again = (seat.gradients for seat in seats)
        assert gradients == again
        vectors = Fraction(long - short, 4 * (LENGTHS[1] - LENGTHS[0]))
        stopped = seats[0].worker.t - gradients if runs[0].stops.count else 0  # pulls that no push followed
        expected = volume * gradients + stopped
        if isinstance(scheme, GoSGD):  # p is how often a worker sends in the mean; when it does follows from the seed
            edges = [edge for t in range(STEPS) for edge in scheme.messages(workers, t, 1).items()]
            expected = Fraction(sum(edge.count(rank) for edge in edges))
            assert expected == pytest.approx(float(volume) * gradients, abs=10)
        assert vectors == expected
        numbers = short - int(4 * LENGTHS[0] * vectors)
        assert numbers >= 0
        assert numbers % 8 == 0


def test_there_are_runs_in_which_gradients_are_stopped() -> None:
    assert counted("k-sync", LENGTHS[0]).stops.count
