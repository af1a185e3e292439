"""How old gradients are when they enter. Algorithms, section 11: conservation (11.2) and distributions (11.3)."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
from beds.short_windows import short
from oracles import SCHEMES, line, run

from paceline import Result
from paceline.simulator.engine import SimulationEngine

# whose pushes each make an update, and who never wait or drop; test_laws_stale.py has the laws of the others
COLLECTING = {
    "k-async",
    "k-batch-async",
    "softsync",
    "fedbuff",
    "decoupled-diloco",
    "halos",
}  # several pushes an update
DROPPING = {"drop-stale", "ringmaster"}
ASYNCHRONOUS = [
    name
    for name, cls in SCHEMES.items()
    if cls.asynchronous and cls.methods and cls.waits is None and name not in COLLECTING | DROPPING
]
SYNCHRONOUS = [name for name, cls in SCHEMES.items() if not cls.asynchronous and not cls.alone]
COMPUTE = {
    "constant": {"compute": "constant:1"},
    "exponential": {"compute": "exponential:1"},
    "pareto": {"compute": "pareto:1,1.1"},
    "log-normal": {"compute": "log-normal:1,1"},
    "uneven": {"compute": "constant:1", "speeds": (1, 2, 0.25, 3, 1, 1.5, 0.1)},
    "uneven and random": {"compute": "exponential:1", "speeds": (1, 4, 0.5, 3, 1, 0.2, 7)},
}
CASES = [*((compute, 7) for compute in COMPUTE), *(("exponential", workers) for workers in (1, 2, 3))]


def lr_zero(name: str, workers: int, steps: int, **options: object) -> Result:
    """Staleness does not depend on the gradients, so the centre may stay where it is."""
    return run(line(), name, workers, steps, **short(name) | {"lr": 0.0} | options)


def holders(name: str, workers: int) -> int:
    """How many copies of the centre are out: one for each worker, or one for each group."""
    return len({SCHEMES[name]().holder(rank) for rank in range(workers)})


def total(result: Result) -> int:
    return sum(tau * count for tau, count in result.staleness.histogram.items())


def test_there_are_schemes_of_both_kinds() -> None:
    assert {"async", "downpour", "aeasgd", "groups", "hogwild"} <= set(ASYNCHRONOUS)
    assert {"sync", "allreduce", "averaging", "easgd"} <= set(SYNCHRONOUS)


@pytest.mark.parametrize(("compute", "workers"), CASES)
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_staleness_is_conserved_after_every_single_update(name: str, compute: str, workers: int) -> None:
    """Sum of tau over all pushes + what is still out = updates * (copies - 1): each update ages the others by one."""
    options = dict(COMPUTE[compute])
    if "speeds" in options:
        options["speeds"] = options["speeds"][:workers]
    copies, seen = holders(name, workers), []

    def conserved(e: SimulationEngine) -> None:
        assert e.scheduler is not None
        ledger, seen_before = e.scheduler.ledger, len(seen)
        seen.append(ledger.cells.total + ledger.outstanding(e.updates))
        assert e.updates == seen_before + 1
        assert seen[-1] == e.updates * (copies - 1)

    result = lr_zero(name, workers, 40, watch=conserved, **options)
    assert len(seen) == result.updates == 40
    assert sum(result.staleness.histogram.values()) == 40
    assert total(result) + result.staleness.outstanding == 40 * (copies - 1)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_staleness_counts_between_groups(size: int) -> None:
    groups = -(-7 // size)
    result = lr_zero("groups", 7, 60, size=size, compute="exponential:1")
    assert total(result) + result.staleness.outstanding == 60 * (groups - 1)
    assert result.staleness.max > 0 or groups == 1


@pytest.mark.parametrize("access", [0.0, 0.3, 5.0])
def test_hogwild_conserves_staleness_however_long_it_reads_and_adds(access: float) -> None:
    result = run("toy", "hogwild", 5, 80, lr=0.001, access=access, compute="exponential:1")
    assert total(result) + result.staleness.outstanding == 80 * 4


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_a_worker_that_holds_nothing_while_messages_travel_does_not_age(name: str) -> None:
    result = lr_zero(name, 4, 60, compute="exponential:1", network="latency=0.5")
    bound = 60 * (holders(name, 4) - 1)
    assert total(result) + result.staleness.outstanding <= bound
    if name == "async":
        assert total(result) + result.staleness.outstanding < bound


@pytest.mark.parametrize(("compute", "workers"), CASES)
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_synchronous_gradients_are_never_stale(name: str, compute: str, workers: int) -> None:
    options = dict(COMPUTE[compute])
    if "speeds" in options:
        options["speeds"] = options["speeds"][:workers]
    result = lr_zero(name, workers, 15, **options)
    assert set(result.staleness.histogram) == {0}
    assert (result.staleness.mean, result.staleness.max) == (0.0, 0)


def test_backup_workers_drop_rather_than_apply_what_is_stale() -> None:
    for name in ("sync", "sync-repeat"):
        result = lr_zero(name, 7, 100, aggregate=4, compute="exponential:1")
        assert result.staleness.histogram == {0: 400}
        assert result.dropped > 0


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("name", [name for name in ASYNCHRONOUS if name != "groups"])
def test_equal_workers_push_in_turn_and_are_all_but_one_versions_old(name: str, workers: int) -> None:
    """After the first round, in which the k-th push is k versions old."""
    result = lr_zero(name, workers, 50)
    expected = Counter(dict.fromkeys(range(workers), 1))
    expected[workers - 1] += 50 - workers
    assert result.staleness.histogram == dict(expected)


def test_equal_groups_push_in_turn() -> None:
    assert lr_zero("groups", 6, 50, size=2).staleness.histogram == {0: 1, 1: 1, 2: 48}


def per_push(workers: int, steps: int, **options: object) -> list[tuple[int, int]]:
    """(who pushed, how stale) for every update of asynchronous SGD."""
    seen: list[tuple[int, int]] = []

    def note(e: SimulationEngine) -> None:
        assert e.scheduler is not None
        seen.append((e.scheduler.ledger.caller, e.scheduler.ledger.cells.total))

    lr_zero("async", workers, steps, watch=note, **options)
    totals = [0, *(so_far for _, so_far in seen)]
    return [(rank, after - before) for (rank, _), (before, after) in zip(seen, pairwise(totals), strict=True)]


@pytest.fixture(scope="module")
def five() -> list[tuple[int, int]]:
    """Five equal workers with exponential times: (who pushed, how stale)."""
    return per_push(5, 12_000, compute="exponential:1")[100:]


def test_with_exponential_times_staleness_is_geometric(five: list[tuple[int, int]]) -> None:
    counts = Counter(tau for _, tau in five)
    for k in range(12):
        assert counts[k] / len(five) == pytest.approx(1 / 5 * (1 - 1 / 5) ** k, abs=0.012), f"tau = {k}"


def test_its_mean_variance_and_mean_weight_are_those_of_the_law(five: list[tuple[int, int]]) -> None:
    taus = [tau for _, tau in five]
    mean = sum(taus) / len(taus)
    assert mean == pytest.approx(5 - 1, rel=0.01)  # conserved: only what is out at the ends is missing
    assert sum((tau - mean) ** 2 for tau in taus) / len(taus) == pytest.approx(5 * (5 - 1), rel=0.08)
    assert sum(1 / (tau + 1) for tau in taus) / len(taus) == pytest.approx(math.log(5) / (5 - 1), rel=0.04)


def test_with_exponential_times_anybody_may_push_next(five: list[tuple[int, int]]) -> None:
    pairs = Counter((a, b) for (a, _), (b, _) in pairwise(five))
    for pair in ((a, b) for a in range(5) for b in range(5)):
        assert pairs[pair] / len(five) == pytest.approx(1 / 5**2, abs=0.008), pair


@pytest.mark.parametrize("compute", ["constant:1", "exponential:1", "uniform:0,2"])
def test_a_worker_waits_for_what_the_others_do_meanwhile(compute: str) -> None:
    """Mean tau of worker i = (sum of all rates - its own) / its own, whatever the law of times."""
    speeds = (1.0, 2.0, 5.0)
    pushes = per_push(3, 9000, compute=compute, speeds=speeds)[100:]
    for rank, speed in enumerate(speeds):
        taus = [tau for who, tau in pushes if who == rank]
        assert len(taus) / len(pushes) == pytest.approx(speed / sum(speeds), rel=0.06)
        assert sum(taus) / len(taus) == pytest.approx((sum(speeds) - speed) / speed, rel=0.06)
