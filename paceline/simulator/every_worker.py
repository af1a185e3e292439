"""The centre of a decentralised run: all living workers together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.scheme import Scheme
from paceline.state import State, Vector, mean_of

if TYPE_CHECKING:
    from paceline.simulator.simulated_worker import SimulatedWorker


class EveryWorker:
    """An update is one step of every living worker; the model is the mean of their models."""

    def __init__(self, seats: Sequence[SimulatedWorker]) -> None:
        self._living = [seat.worker for seat in seats if seat.worker.alive] or [seats[0].worker]

    @property
    def v(self) -> int:
        """The updates that all of them have made."""
        return min([int(worker.state.v) for worker in self._living])

    @property
    def last(self) -> State:
        """The state of the worker that has made the fewest."""
        return min(self._living, key=lambda worker: (worker.state.v, worker.rank)).state

    def model(self, scheme: Scheme) -> Vector:
        return mean_of([scheme.model(worker.state) for worker in self._living])
