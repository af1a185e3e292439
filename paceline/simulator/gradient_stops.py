"""Gradients that simulated workers give up when the server has reached a version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.ops import Grad, Pending
from paceline.simulator.simulated_worker import SimulatedWorker

if TYPE_CHECKING:
    from paceline.simulator.engine import SimulationEngine


class GradientStops:
    """The gradients with `until` that are in flight. The server tells a worker when its version is there; a message
    brings it, and the worker stops when it arrives."""

    def __init__(self, engine: SimulationEngine) -> None:
        self._engine = engine
        self.watched: list[tuple[SimulatedWorker, int, Grad, Pending[Any]]] = []  # with the worker's generation
        self.count = 0  # gradients that were stopped

    def watch(self, seat: SimulatedWorker, op: Grad, target: Pending[Any]) -> None:
        self.watched.append((seat, seat.generation, op, target))

    def tell(self, version: int) -> None:
        """Send a message to each worker whose gradient is useless at this version."""
        kept = []
        for entry in self.watched:
            seat, generation, op, target = entry
            if target.done or generation != seat.generation:
                continue
            assert op.until is not None
            if version < op.until:
                kept.append(entry)
                continue
            engine = self._engine
            engine.later(seat, engine.message(seat, version, inward=True), engine.on_told, op, target)
        self.watched = kept
