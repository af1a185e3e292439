"""A simulation at rest, as named tensors and plain numbers: enough to go on with the same bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.errors import RunError
from paceline.simulator.engine import SimulationEngine
from paceline.simulator.simulated_worker import SimulatedWorker


@dataclass(frozen=True)
class Snapshot:
    """`tensors` by name (`server.x`, `worker.2.x`, …); `numbers` is plain data that JSON can hold."""

    tensors: dict[str, Tensor]
    numbers: dict[str, Any]


def save(engine: SimulationEngine) -> Snapshot:
    """Everything that the future of the run depends on. All workers must stand between two steps (`run(park_at=…)`)."""
    tensors: dict[str, Tensor] = {}
    if engine.scheduler is not None:
        tensors |= {f"server.{name}": cell for name, cell in engine.centre.saved().items()}
        tensors |= {f"ledger.{name}": cell for name, cell in engine.scheduler.ledger.saved().items()}
    people = []
    for seat in engine.seats:
        rank = seat.worker.rank
        if not _between_steps(engine, seat):
            raise RunError(f"worker:{rank} waits at {seat.driver.line()}, inside step {seat.worker.t}: not at rest")
        tensors |= {f"worker.{rank}.{name}": cell for name, cell in seat.worker.state.saved().items()}
        tensors |= {f"buffer.{rank}.{name}": cell.clone() for name, cell in seat.buffers.items()}
        if seat.worker._rng is not None:
            tensors[f"rng.{rank}"] = seat.worker._rng.get_state()
        people.append(
            {
                "alive": seat.worker.alive,
                "t": seat.worker.t,
                "gradients": seat.gradients,
                "samples": seat.samples,
                "issued": seat.issued,
                "awaits": seat.awaits,
                "compute": seat.rng.bit_generator.state,
            }
        )
    numbers = {"now": engine.now, "gradients": engine.gradients, "samples": engine.samples, "workers": people}
    return Snapshot(tensors, numbers)


def load(engine: SimulationEngine, snapshot: Snapshot) -> None:
    """Put a fresh engine (same task, scheme, workers, seed) where the saved one stood."""
    tensors, numbers = snapshot.tensors, snapshot.numbers
    for rank, saved in enumerate(numbers["workers"]):
        if not saved["alive"]:
            engine.injector.kill(rank)  # before the server's state comes, which has seen them leave
    if engine.servers is not None:
        engine.servers.put(_under("server.", tensors), _under("ledger.", tensors))
    engine.now, engine.gradients, engine.samples = numbers["now"], numbers["gradients"], numbers["samples"]
    engine._heap.clear()
    for seat, saved in zip(engine.seats, numbers["workers"], strict=True):
        rank = seat.worker.rank
        seat.worker.state.restore(_under(f"worker.{rank}.", tensors))
        for name, cell in _under(f"buffer.{rank}.", tensors).items():
            seat.buffers[name].copy_(cell)
        if f"rng.{rank}" in tensors:
            seat.worker.rng.set_state(tensors[f"rng.{rank}"])
        seat.worker.t = saved["t"]
        seat.gradients, seat.issued, seat.awaits = saved["gradients"], saved["issued"], saved["awaits"]
        seat.samples = saved["samples"]
        seat.rng.bit_generator.state = saved["compute"]
        seat.batches = engine.task.batches(rank, engine.workers, engine.seed, first=saved["gradients"])
        seat.parked = saved["alive"]
    engine.recovery.rebase()


def _between_steps(engine: SimulationEngine, seat: SimulatedWorker) -> bool:
    """Parked, dead, or waiting with a step's first call, which has had no effect yet and can be made again."""
    if seat.parked or not seat.worker.alive:
        return True
    first = seat.driver.awaits == 1
    return first and engine.scheduler is not None and engine.scheduler.waits(seat.worker.rank) is not None


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): cell for name, cell in tensors.items() if name.startswith(prefix)}
