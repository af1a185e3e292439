"""The staleness that theory expects of asynchronous schemes, to be drawn beside what was measured.

Where every worker pulls, computes and pushes in turn, a gradient is as old as the number of pushes of the other workers
between its pull and its push. The mean is then workers - 1, whatever the compute times are.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass

import numpy as np

from paceline.compute_times import ComputeTime, Constant, Exponential
from paceline.scheme import Scheme

# a push of these is dropped if it is old, or several make one update
OTHER_LAWS = {"drop-stale", "ringmaster", "decoupled-diloco", "halos"}
PERIODS = 20_000  # of all workers together, in the renewal model
DRAWS = 200_000


@dataclass(frozen=True)
class ExpectedStaleness:
    """Probabilities by staleness, or the mean alone."""

    name: str
    mean: float
    probabilities: dict[int, float]


def expected_staleness(
    scheme: Scheme, workers: int, law: ComputeTime | None, speeds: tuple[float, ...] = ()
) -> ExpectedStaleness | None:
    """What theory says; None if it says nothing. `law`: None where only the mean is known, as in real processes."""
    if not scheme.asynchronous:
        return ExpectedStaleness("synchronous: 0", 0.0, {0: 1.0})
    gradients = _gradients_per_push(scheme, workers)
    if gradients is None:
        return None
    mean = workers - 1.0
    if law is None or not all(method.atomic for method in scheme.methods.values()):  # hogwild: reading takes time too
        return ExpectedStaleness("mean: workers − 1", mean, {})
    if len(set(speeds)) <= 1:
        if isinstance(law, Constant):
            return ExpectedStaleness("workers − 1", mean, {workers - 1: 1.0})
        if isinstance(law, Exponential) and gradients == 1:
            share = 1 / workers
            return ExpectedStaleness(
                "geometric law", mean, {k: share * (1 - share) ** k for k in range(8 * workers + 1)}
            )
    return ExpectedStaleness("renewal model", mean, _renewal(workers, gradients, law, speeds))


def _gradients_per_push(scheme: Scheme, workers: int) -> int | None:
    """The gradients that a worker computes between its pull and its push; None if its updates follow other laws."""
    if not scheme.methods or scheme.waits is not None or scheme.name in OTHER_LAWS:
        return None
    if len({scheme.holder(rank) for rank in range(workers)}) != workers:
        return None
    if any(getattr(scheme, name, None) for name in ("n_push", "n_fetch", "paper_schedule")):
        return None
    gradients, window = scheme.gradients_per_update(workers), getattr(scheme, "window", 1)
    return int(gradients) if gradients is not None and gradients == window else None


def _renewal(workers: int, gradients: int, law: ComputeTime, speeds: tuple[float, ...]) -> dict[int, float]:
    """The distribution of the number of other workers' pushes in a worker's period, counted over independent workers
    whose periods are sums of draws of the law."""
    rng = np.random.Generator(np.random.PCG64(0))
    pace = speeds or (1.0,) * workers
    drawn = [0] * workers

    def period(rank: int) -> float:
        total = sum(law.draw(rank, drawn[rank] + k, rng) for k in range(gradients)) / pace[rank]
        drawn[rank] += gradients
        return total

    heap = [(period(rank), rank) for rank in range(workers)]
    heapq.heapify(heap)
    pulled, counts = [0] * workers, Counter[int]()
    number = min(PERIODS, DRAWS // gradients)
    for push in range(number):
        time, rank = heap[0]
        if push >= number // 10:  # workers do not start together in the long run
            counts[push - pulled[rank]] += 1
        pulled[rank] = push + 1
        heapq.heapreplace(heap, (time + period(rank), rank))
    whole = sum(counts.values())
    return {tau: counts[tau] / whole for tau in sorted(counts)}
