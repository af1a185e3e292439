"""`batched` with plain asynchronous SGD: many pushes and pulls at once leave the engine as single ones do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batched_runs import Several
from small_models import task
from torch import Tensor

from paceline.compute_times import parse_times
from paceline.config import build
from paceline.rules import SGD, Momentum
from paceline.simulator.cost import Cost, parse_link
from paceline.simulator.engine import SimulationEngine
from paceline.state import State


def state_of(engine: SimulationEngine) -> list[Any]:
    """All counts of a run."""
    assert engine.scheduler is not None
    seats = [
        (seat.worker.t, seat.worker.v, seat.gradients, seat.samples, seat.issued, seat.awaits) for seat in engine.seats
    ]
    ledger = [engine.scheduler.ledger.cells.cell(name).tolist() for name in engine.scheduler.ledger.cells]
    return [engine.now, engine.events, engine.gradients, engine.samples, engine.updates, engine.scheduler.calls,
            engine.staleness, seats, ledger]  # fmt: skip


UNEQUAL = (1.0, 2.0, 0.3, *[1.0] * 9)


@pytest.mark.parametrize(
    ("compute", "speeds"),
    [("constant:1", ()), ("constant:1", UNEQUAL), ("exponential:1", UNEQUAL), ("uniform:0.5,1.5", ())],
)
def test_many_pushes_and_pulls_at_once_leave_the_engine_as_single_ones_do(compute: str, speeds: Any) -> None:
    cost = Cost(compute_law=parse_times(compute), speeds=speeds)
    alone, at_once = (
        SimulationEngine(task(), build.scheme_of("async", {}), workers=12, seed=5, cost=cost, batched=batched)
        for batched in (False, True)
    )
    assert at_once._lane is not None
    seen: tuple[list[Any], list[Any]] = ([], [])
    calls = []
    at_once._drawn.take = lambda *given, take=at_once._drawn.take: calls.append(1) or take(*given)  # type: ignore
    for run, told in zip((alone, at_once), seen, strict=True):
        run.run(31)
        told.append(state_of(run))
        run.run(150, seconds=9.25)  # ends by its time, or by its updates
        told.append(state_of(run))
        run.run(240, watch=lambda run, told=told: told.append((run.updates, run.now)), watch_every=60)
        in_lane = run.gradients - len(calls)
        told.append(state_of(run))
        if compute == "constant:1":
            run.run(park_at=25)
            told.append(state_of(run))
    assert [one for one in seen[0] if not isinstance(one, tuple) or one[0] in (60, 120, 180, 240)] == [
        one for one in seen[1] if not isinstance(one, tuple) or one[0] in (60, 120, 180, 240)
    ]
    assert in_lane > 120  # of 240 and some: most did not go through an event
    torch.testing.assert_close(alone.centre.x, at_once.centre.x, rtol=1e-4, atol=1e-5)
    for seat, twin in zip(alone.seats, at_once.seats, strict=True):
        torch.testing.assert_close(seat.worker.x, twin.worker.x, rtol=1e-4, atol=1e-5)
        assert seat.worker.loss == pytest.approx(twin.worker.loss, rel=1e-4)
    assert alone.loss == pytest.approx(at_once.loss, rel=1e-4)


@pytest.mark.parametrize(
    ("scheme", "settings"),
    [
        (build.scheme_of("async", {"rule": "momentum"}), {}),
        (build.scheme_of("async", {"rule": "sgd", "rule.weight_decay": 0.1}), {}),
        (build.scheme_of("async", {"lr": "cosine:0.1,over=100"}), {}),
        (build.scheme_of("sync", {}), {}),
        (Several(), {}),
        (build.scheme_of("async", {}), {"servers": 2}),
        (build.scheme_of("async", {}), {"checkpoint_every": 5}),
        (build.scheme_of("async", {}), {"cost": Cost(network=parse_link("latency=0.1"))}),
    ],
)
def test_other_runs_have_an_event_for_each_call(scheme: Any, settings: dict[str, Any]) -> None:
    given = {"workers": 3, "seed": 0, "cost": Cost(), "batched": True} | settings
    assert SimulationEngine(task(), scheme, **given)._lane is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_row_of_updates_is_the_updates_one_by_one(device: str) -> None:
    """`meta` takes the way of a GPU, here on the CPU."""
    x, gradients = torch.randn(50), torch.randn(9, 50)
    state, expected = State(x=x), []
    for g in gradients:
        SGD().apply(state, g, 0.1)
        expected.append(state.x.clone())
    start = x if device == "cpu" else Elsewhere(x)
    found = SGD().row(start, gradients, 0.1)
    assert found is not None
    torch.testing.assert_close(found, torch.stack(expected))
    assert SGD(weight_decay=0.1).row(x, gradients, 0.1) is None
    assert Momentum().row(x, gradients, 0.1) is None


class Elsewhere(Tensor):
    """Says that it is on another device."""

    @property
    def device(self) -> Any:
        return torch.device("meta")
