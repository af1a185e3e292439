"""Which assumptions matter: each is changed alone, and the forecast is made again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from paceline.compute_times import Constant, Exponential
from paceline.planning.failures import Failures
from paceline.planning.forecast import Assumptions
from paceline.planning.plan_cells import Forecast, PlanCell, Variation, fastest
from paceline.planning.spelling import Stragglers, network_text
from paceline.simulator.cost import NetworkLink


def variations(
    found: Forecast,
    best: PlanCell,
    networks: Sequence[NetworkLink],
    cells: Callable[[Assumptions, Failures | None], list[PlanCell]],
) -> list[Variation]:
    """Every assumption changed alone, at the recommended number of workers. `networks`: others that were given."""
    seen = []
    for name, given, failures in changed(found.given, found.failures, networks):
        there = cells(given, failures)
        own = next(one for one in there if one.scheme == best.scheme)
        first = fastest(there) or own
        seen.append(Variation(name, own.rate / best.rate, first.scheme, first.scheme != best.scheme))
    return seen


def changed(
    given: Assumptions, failures: Failures, networks: Sequence[NetworkLink]
) -> Iterator[tuple[str, Assumptions, Failures]]:
    link = given.network
    for name, factor in (("bandwidth × 2", 2.0), ("bandwidth ÷ 2", 0.5)):
        yield name, replace(given, network=NetworkLink(link.latency, link.bandwidth * factor)), failures
    for name, factor in (("latency × 2", 2.0), ("latency ÷ 2", 0.5)):
        yield name, replace(given, network=NetworkLink(link.latency * factor, link.bandwidth)), failures
    for name, factor in (("gradient time + 20 %", 1.2), ("gradient time − 20 %", 0.8)):
        yield name, replace(given, gradient_factor=given.gradient_factor * factor), failures
    yield "no stragglers", replace(given, stragglers=Stragglers(Constant(1.0))), failures
    yield "exponential times", replace(given, stragglers=Stragglers(Exponential(1.0))), failures
    slow = Stragglers(given.stragglers.factors, 0.1, 3.0)
    yield "a tenth of the nodes 3 × slower", replace(given, stragglers=slow), failures
    yield "twice the servers", replace(given, servers=given.servers * 2), failures
    if failures.rate:
        yield "failures × 3", given, replace(failures, rate=failures.rate * 3)
        yield "restart × 3", given, replace(failures, restart=failures.restart * 3)
    else:
        yield "0.01 failures per node-hour", given, replace(failures, rate=0.01)
    for other in networks:
        yield f"network {network_text(other)}", replace(given, network=other), failures
