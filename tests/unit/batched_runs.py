"""A run whose gradients are computed at once, beside the same run with single ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paceline.compute_times import parse_times
from paceline.config import build
from paceline.ops import Grad
from paceline.schemes.async_ import AsyncSGD
from paceline.simulator.cost import Cost, parse_link
from paceline.simulator.engine import SimulationEngine
from paceline.simulator.faults import parse_fault
from paceline.worker import Worker


class Course:
    """What happened in a run: the moment, update, worker, loss of every gradient."""

    def __init__(self, engine: SimulationEngine) -> None:
        self.order: list[tuple[Any, ...]] = []
        self.losses: list[float] = []
        taken, engine._lane = engine._drawn.take, None

        def take(seat: Any, op: Grad) -> Any:
            found = taken(seat, op)
            self.order.append((engine.now, engine.updates, seat.worker.rank, seat.worker.t, seat.gradients, found.size))
            self.losses.append(found.loss)
            return found

        engine._drawn.take = take  # type: ignore[method-assign]


def course(job: Any, scheme: str, hyper: dict[str, Any], *, batched: bool, steps: int = 20, **settings: Any) -> Any:
    faults = [parse_fault(text) for text in settings.pop("faults", ())]
    cost = Cost(
        compute_law=parse_times(settings.pop("compute", "exponential:1")),
        network=parse_link(settings.pop("network", "")),
        access=parse_times("exponential:0.3"),
        speeds=settings.pop("speeds", ()),
    )
    chosen = build.scheme_of(scheme, hyper)
    engine = SimulationEngine(job, chosen, seed=3, cost=cost, faults=faults, batched=batched, **settings)
    seen = Course(engine)
    engine.run(steps)
    return engine, seen


def assert_same(job: Any, scheme: str, hyper: dict[str, Any], tolerance: float = 1e-4, **settings: Any) -> None:
    (one, alone), (other, at_once) = (
        course(job, scheme, hyper, batched=batched, **dict(settings)) for batched in (False, True)
    )
    assert alone.order == at_once.order
    assert one.now == other.now
    assert one.events == other.events
    assert one.staleness == other.staleness
    assert (one.gradients, one.samples, one.updates) == (other.gradients, other.samples, other.updates)
    assert one.accounts == other.accounts
    np.testing.assert_allclose(alone.losses, at_once.losses, rtol=tolerance)
    for seat, twin in zip(one.seats, other.seats, strict=True):
        for name in seat.worker.state:
            torch.testing.assert_close(
                seat.worker.state.cell(name), twin.worker.state.cell(name), rtol=tolerance, atol=tolerance
            )
    torch.testing.assert_close(one.centre.x, other.centre.x, rtol=tolerance, atol=tolerance)


@dataclass(frozen=True)
class Several(AsyncSGD):
    """Three gradients of a worker in flight."""

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull()
        begun = [await w.start(w.grad(w.x * (1 + k))) for k in range(3)]
        for one in begun:
            await self.push(await one, w.v)
