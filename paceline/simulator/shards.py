"""Calls on ranges of the vector: cut for several servers, or performed piece by piece where a call is not atomic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.ops import Call, Op
from paceline.sampling import mixed
from paceline.simulator.simulated_worker import SimulatedWorker

if TYPE_CHECKING:
    from paceline.simulator.engine import SimulationEngine


def cut(args: tuple[Any, ...], low: int, high: int, length: int) -> tuple[Any, ...]:
    """The arguments for coordinates low to high: vectors as long as x are cut, everything else stays whole."""
    return tuple(
        cut(arg, low, high, length)
        if isinstance(arg, tuple)
        else arg[..., low:high]
        if _is_vector(arg, length)
        else arg
        for arg in args
    )


def assembled(results: Sequence[Any], width: int) -> Any:
    """One result from those of several ranges, the first of this width: vectors are joined, all else is the first's."""
    first = results[0]
    if isinstance(first, tuple):
        return tuple(assembled(items, width) for items in zip(*results, strict=True))
    return torch.cat(list(results), dim=-1) if _is_vector(first, width) else first


def _is_vector(value: Any, length: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.is_floating_point() and value.shape[-1] == length


class ShardedCalls:
    """Performs calls that are not atomic: pieces of the vector in turn, interleaved with those of other workers."""

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
            engine.later(seat, seconds, self.on_part, op, target, part, results)

    def on_part(
        self, seat: SimulatedWorker, op: Call[Any], target: Op[Any], part: tuple[int, int, int], results: list[Any]
    ) -> None:
        engine = self._engine
        assert engine.scheduler is not None
        result, answers = engine.scheduler.perform_part(seat.worker.rank, op, part)
        results.append(result)
        engine.deliver_answers(answers)
        _, high, length = part
        if high == length:
            if engine.watched:
                engine.accounts.carried(seat)
            engine.deliver(seat, target, assembled(results, length // len(results)))
