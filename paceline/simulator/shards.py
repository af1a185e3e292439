"""Calls that are not atomic: pieces of the vector, one after the other, between those of other workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.ops import Call, Op
from paceline.sampling import mixed
from paceline.simulator.partition import joined
from paceline.simulator.simulated_worker import SimulatedWorker

if TYPE_CHECKING:
    from paceline.simulator.engine import SimulationEngine


class ShardedCalls:
    """The way of a worker through the shared vector; no server has a part in it."""

    def __init__(self, engine: SimulationEngine) -> None:
        self._engine = engine

    def begin(self, seat: SimulatedWorker, op: Call[Any], target: Op[Any]) -> None:
        engine, rank = self._engine, seat.worker.rank
        length = len(engine.centre.x)
        pieces = max(1, min(getattr(engine.scheme, "chunks", 1), length))
        edges = [length * k // pieces for k in range(pieces + 1)]
        number = mixed(engine.seed, "access", rank, seat.awaits)
        results: list[Any] = []
        for k, seconds in enumerate(engine.cost.pass_over(rank, pieces, number)):
            part = (edges[k], edges[k + 1], length)
            engine.later(seat, seconds, self.on_part, (op, target, part, results))

    def on_part(
        self, seat: SimulatedWorker, payload: tuple[Call[Any], Op[Any], tuple[int, int, int], list[Any]]
    ) -> None:
        op, target, part, results = payload
        engine = self._engine
        assert engine.desk is not None
        result, answers = engine.desk.perform_part(seat.worker.rank, op, part)
        results.append(result)
        engine.deliver_answers(answers)
        if part[1] == part[2]:
            if engine.watched:
                engine.accounts.carried(seat)
            engine.deliver(seat, target, joined(results))
