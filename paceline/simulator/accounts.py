"""The fate of every gradient of a simulation: used + dropped + lost + rolled back + waiting = drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.simulator.simulated_worker import SimulatedWorker


@dataclass
class Accounts:
    """Counts gradients by their fate, at the moment at which it is known.

    A gradient is *used* when the first call after it is performed (without a server: when its mean closes, or its step
    ends); *dropped* if that call refused it; *lost* if its worker died or returned to a checkpoint before that; *rolled
    back* if the run returned to a checkpoint older than its use. Gradients of finished steps wait in the worker's cells
    and survive its death.
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
        """All waiting gradients of this worker have entered the centre, or were refused."""
        number = seat.fresh + seat.waiting
        seat.fresh = seat.waiting = 0
        if refused:
            self.dropped += number
        else:
            self.used += number

    def finished(self, seat: SimulatedWorker, *, counted: bool) -> None:
        """A step has ended: its gradients are used with it, or wait in the worker's cells."""
        if counted:
            self.carried(seat)
        seat.waiting += seat.fresh
        seat.fresh = 0

    def died(self, seat: SimulatedWorker) -> None:
        self.lost += seat.fresh
        seat.fresh = 0

    def forgotten(self, seat: SimulatedWorker) -> None:
        """The worker's cells are replaced: the gradients that waited in them are lost."""
        self.lost += seat.fresh + seat.waiting
        seat.fresh = seat.waiting = 0

    def returned(self, used: int, dropped: int) -> None:
        """The run has returned to a checkpoint with these counts."""
        self.rolled_back += self.used - used + self.dropped - dropped
        self.used, self.dropped = used, dropped

    def closed(self, seats: list[SimulatedWorker]) -> dict[str, int]:
        """The counts at the end: gradients that still wait are lost."""
        waiting = sum(seat.fresh + seat.waiting for seat in seats)
        counts = {"used": self.used, "dropped": self.dropped, "lost": self.lost + waiting}
        return counts | {"rolled back": self.rolled_back}
