"""A simulation at rest: what is kept, and when it cannot be."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from beds import simulation_snapshot as snapshot
from torch import nn

from paceline import TorchTask
from paceline.compute_times import parse_times
from paceline.config.build import scheme_of
from paceline.errors import RunError, SchemeError
from paceline.scheme import Scheme
from paceline.simulator.cost import Cost
from paceline.simulator.engine import SimulationEngine
from paceline.task import Task
from paceline.tasks.quadratic import quadratic
from paceline.worker import Worker


def engine(
    scheme: str | Scheme = "async", *, workers: int = 3, task: Task | None = None, **hyper: Any
) -> SimulationEngine:
    cost = Cost(parse_times("exponential:1"))
    return SimulationEngine(
        task or quadratic(dim=4, noise=0.5), scheme_of(scheme, hyper), workers=workers, seed=1, cost=cost
    )


def moved(run: SimulationEngine, **same: Any) -> SimulationEngine:
    """The same run in a fresh engine."""
    saved = snapshot.save(run)
    other = engine(run.scheme, workers=run.workers, task=run.task, **same)
    snapshot.load(other, snapshot.Snapshot(saved.tensors, json.loads(json.dumps(saved.numbers))))
    return other


def test_a_worker_inside_its_step_is_not_at_rest() -> None:
    run = engine()
    run.run(5)
    with pytest.raises(RunError, match=r"worker:0 waits at async_\.py:\d+, inside step 3: not at rest"):
        snapshot.save(run)


def test_what_is_kept_has_names() -> None:
    run = engine("groups", workers=4, size=2)
    run.run(park_at=2)
    saved = snapshot.save(run)
    assert {"server.x", "server.v", "server.given", "ledger.histogram", "worker.0.x", "worker.3.v"} <= set(
        saved.tensors
    )
    assert set(saved.numbers) == {"now", "gradients", "samples", "workers"}
    assert [person["t"] for person in saved.numbers["workers"]] == [2, 2, 2, 2]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("park_at", [1, 2, 3, 6])
@pytest.mark.parametrize(("name", "aggregate"), [("sync", 2), ("sync", 1), ("sync-repeat", 5)])
def test_who_waits_at_the_barrier_waits_there_again(name: str, aggregate: int, park_at: int, seed: int) -> None:
    """A late worker may stand at its first call when the others rest: it makes the call anew."""
    run = engine(name, task=quadratic(dim=4, noise=0.1 + seed), workers=5, aggregate=aggregate)
    run.run(park_at=park_at)
    other = moved(run)
    goal = run.updates + 9
    run.run(goal)
    other.run(goal)
    assert torch.equal(run.centre.x, other.centre.x)
    assert run.now == other.now
    assert run.scheduler is not None
    assert other.scheduler is not None
    assert run.scheduler.ledger.histogram() == other.scheduler.ledger.histogram()
    assert run.scheduler.ledger.cells.refused == other.scheduler.ledger.cells.refused


def test_a_workers_own_random_stream_goes_on() -> None:
    @dataclass(frozen=True)
    class Dicing(Scheme, name="dicing"):
        async def step(self, w: Worker) -> None:
            g = await w.grad()
            w.x -= 0.1 * g * torch.rand(4, generator=w.rng)
            w.v += 1

    run = engine(Dicing())
    run.run(park_at=3)
    other = moved(run)
    for one in (run, other):
        one.run(park_at=6)
    assert [torch.equal(a.worker.x, b.worker.x) for a, b in zip(run.seats, other.seats, strict=True)] == [True] * 3


def test_buffers_of_every_worker_go_on() -> None:
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))

    def task() -> TorchTask:
        return TorchTask(
            lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)), nn.functional.mse_loss, (x, x[:, :1])
        )

    run = engine("async", task=task())
    run.run(park_at=3)
    saved = snapshot.save(run)
    assert "buffer.2.0.running_mean" in saved.tensors
    other = engine("async", task=task())
    snapshot.load(other, saved)
    for one in (run, other):
        one.run(park_at=6)
    for a, b in zip(run.seats, other.seats, strict=True):
        assert all(torch.equal(a.buffers[name], b.buffers[name]) for name in a.buffers)
    assert torch.equal(run.centre.x, other.centre.x)


def test_another_scheme_or_size_does_not_fit() -> None:
    run = engine("async", rule="adam")
    run.run(park_at=2)
    saved = snapshot.save(run)
    with pytest.raises(SchemeError, match=r"unknown \['adam_mean', 'adam_square', 'adam_step'\]"):
        snapshot.load(engine("async"), saved)
    with pytest.raises(SchemeError, match="has shape"):
        snapshot.load(engine("async", rule="adam", task=quadratic(dim=5)), saved)
    with pytest.raises(SchemeError, match="saved state does not fit"):
        snapshot.load(engine("sync"), saved)
