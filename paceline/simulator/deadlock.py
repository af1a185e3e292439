"""The report of a simulation in which nothing can happen any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import Deadlock, RunError
from paceline.ops import Mean, Meet

if TYPE_CHECKING:
    from paceline.simulator.engine import SimulationEngine
    from paceline.simulator.simulated_worker import SimulatedWorker

_SHOWN = 20  # workers in the report


def stuck(engine: SimulationEngine) -> RunError:
    """The error for an engine that has no more events."""
    when = f"at {engine.now:g} s, after {engine.updates} updates"
    alive = [seat for seat in engine.seats if seat.worker.alive]
    if not alive:
        return RunError(f"no worker is left alive {when}")
    lost = [shard for shard, dead in enumerate(engine.servers.dead) if dead] if engine.servers is not None else []
    if lost:
        return RunError(f"server:{lost[0]} is dead {when}, and nothing restarts it")
    if engine.recovery.returning:
        absent = next(seat.worker.rank for seat in engine.seats if not seat.worker.alive)
        return RunError(f"worker:{absent} is dead {when}, and nothing restarts it: an exact run waits for all")
    lines = [f"deadlock {when}: every living worker waits"]
    lines += [
        f"  worker:{seat.worker.rank} at {seat.driver.line()} for {_why(engine, seat)}" for seat in alive[:_SHOWN]
    ]
    if len(alive) > _SHOWN:
        lines.append(f"  … and {len(alive) - _SHOWN} more")
    dead = [str(seat.worker.rank) for seat in engine.seats if not seat.worker.alive]
    if dead:
        lines.append(f"  dead: worker {', '.join(dead[:_SHOWN])}")
    return Deadlock("\n".join(lines))


def _why(engine: SimulationEngine, seat: SimulatedWorker) -> str:
    op = None if seat.waits_for is None else seat.waits_for.op
    if isinstance(op, Mean):
        return engine.means.explain(op)
    if isinstance(op, Meet):
        return engine.meetings.explain(op)
    scheduler = engine.scheduler
    call = scheduler.waits(seat.worker.rank) if scheduler is not None else None
    return scheduler.explain(call) if scheduler is not None and call is not None else f"{op}"
