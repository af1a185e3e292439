"""What became of every gradient of a simulation: used + dropped + lost + rolled back + waiting = drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.simulator.simulated_worker import SimulatedWorker


@dataclass
class Accounts:
    """Counts gradients by what became of them, at the moment at which it happens.

    A gradient is used when the first call after it is performed (where there is no server: when the mean closes, or the
    step ends, that it went into), dropped when that call refused it, lost when its worker died or returned to a
    checkpoint before that, rolled back when the run returned to a checkpoint from before it counted. Gradients of
    finished steps wait in the worker's cells and survive its death.
    """

    drawn: int = 0
    used: int = 0
    dropped: int = 0
    lost: int = 0
    rolled_back: int = 0

    def draw(self, seat: SimulatedWorker) -> None:
        self.drawn += 1
        seat.fresh += 1

    def carried(self, seat: SimulatedWorker, *, refused: bool = False) -> None:
        """All gradients of this worker that waited have gone into the centre, or were refused."""
        number = seat.fresh + seat.waiting
        seat.fresh = seat.waiting = 0
        if refused:
            self.dropped += number
        else:
            self.used += number

    def finished(self, seat: SimulatedWorker, *, counted: bool) -> None:
        """A step has ended: what it computed has counted with it, or waits in the worker's cells."""
        if counted:
            self.carried(seat)
        seat.waiting += seat.fresh
        seat.fresh = 0

    def died(self, seat: SimulatedWorker) -> None:
        self.lost += seat.fresh
        seat.fresh = 0

    def forgotten(self, seat: SimulatedWorker) -> None:
        """The worker's cells are replaced: what waited in them will not count any more."""
        self.lost += seat.fresh + seat.waiting
        seat.fresh = seat.waiting = 0

    def returned(self, used: int, dropped: int) -> None:
        """The run is where these numbers were true."""
        self.rolled_back += self.used - used + self.dropped - dropped
        self.used, self.dropped = used, dropped

    def closed(self, seats: list[SimulatedWorker]) -> dict[str, int]:
        """The account at the end: what still waits will not count any more."""
        waiting = sum(seat.fresh + seat.waiting for seat in seats)
        counts = {"used": self.used, "dropped": self.dropped, "lost": self.lost + waiting}
        return counts | {"rolled back": self.rolled_back}
