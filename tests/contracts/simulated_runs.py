"""Small runs of any scheme with its default hyper-parameters, and what must be true of each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from beds.short_windows import short
from torch import Tensor

from paceline.compute_times import parse_times
from paceline.config import build, discovery
from paceline.fields import Feed
from paceline.scheme import Scheme
from paceline.simulator.cost import Cost, parse_link
from paceline.simulator.engine import SimulationEngine
from paceline.simulator.faults import Fault
from paceline.task import Task
from paceline.tasks.quadratic import quadratic

BATCH = 3
SCHEMES = discovery.schemes()
made_task: Callable[[], Task] = partial(quadratic, dim=4, noise=0.5, condition=4.0, curvature=0.5)


def scheme_named(name: str, **hyper: Any) -> Scheme:
    return build.scheme_of(SCHEMES[name].value, short(name) | hyper)


def crew(name: str, wanted: int = 3) -> int:
    """As many workers as wanted, or the one that the scheme takes."""
    return 1 if SCHEMES[name].value.alone else wanted


def engine(
    name: str,
    *,
    workers: int = 3,
    seed: int = 1,
    faults: Sequence[Fault] = (),
    shrink: bool = True,
    compute: str = "exponential:1.0",
    network: str = "",
    batch: int = BATCH,
    feed: Feed = "shared",
    **hyper: Any,
) -> SimulationEngine:
    """A noisy quadratic of four coordinates (tests/engines puts tasks of other frameworks there), workers that take
    random times."""
    task = made_task().configured(batch=batch, feed=feed)
    cost = Cost(parse_times(compute), parse_link(network))
    made = scheme_named(name, **hyper)
    return SimulationEngine(task, made, workers=crew(name, workers), seed=seed, cost=cost, faults=faults, shrink=shrink)


def everything(run: SimulationEngine) -> dict[str, Tensor]:
    """All that a run has become, by name."""
    found = {f"centre.{cell}": value for cell, value in run.centre.saved().items()}
    if run.scheduler is not None:
        found |= {f"ledger.{cell}": value for cell, value in run.scheduler.ledger.saved().items()}
    for seat in run.seats:
        rank = seat.worker.rank
        found |= {f"worker.{rank}.{cell}": value for cell, value in seat.worker.state.saved().items()}
        counts = [seat.worker.t, seat.gradients, seat.issued, int(seat.worker.alive)]
        found[f"worker.{rank}.counts"] = torch.tensor(counts)
    found["counts"] = torch.tensor([run.updates, run.gradients, run.samples])
    found["now"] = torch.tensor(run.now, dtype=torch.float64)
    return found


def different(a: SimulationEngine, b: SimulationEngine) -> list[str]:
    """The names of what is not equal bit for bit."""
    ours, theirs = everything(a), everything(b)
    assert ours.keys() == theirs.keys()
    return [key for key, value in ours.items() if not same_bits(value, theirs[key])]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


def run_counting(run: SimulationEngine, updates: int) -> int:
    """Run to so many updates; gives how often the centre was seen to change."""
    seen: list[int] = []
    run.run(updates, watch=lambda engine: seen.append(engine.updates))
    return len(seen)


def check_sound(run: SimulationEngine, updates: int) -> None:
    """A run that reached its goal: whole numbers agree with each other, and the vector is one."""
    assert run.updates == updates
    assert torch.isfinite(run.scheme.model(run.centre)).all()
    assert run.gradients == sum(seat.gradients for seat in run.seats)
    assert run.samples == BATCH * run.gradients
    for seat in run.seats:
        assert 0 <= seat.gradients <= seat.issued
        assert all(torch.isfinite(cell).all() for cell in seat.worker.state.saved().values())
    if run.scheduler is not None:
        ledger = run.scheduler.ledger
        histogram = ledger.histogram()
        assert all(staleness >= 0 for staleness in histogram)
        assert sum(histogram.values()) == ledger.cells.admitted
        assert sum(staleness * count for staleness, count in histogram.items()) == ledger.cells.total
        assert max(histogram, default=0) == ledger.cells.largest
        assert 1 <= ledger.cells.admitted <= run.gradients + 2 * run.workers
        assert int(ledger.cells.held.min()) >= -1
        assert int(ledger.cells.held.max()) <= run.updates
