"""A worker of a simulation, and the fate of its gradients: used + dropped + lost + rolled back + waiting = drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from paceline.ops import Pending
from paceline.runtime.gradient_norm import GradientNorm
from paceline.runtime.hook_calls import HookCalls
from paceline.runtime.step_driver import StepDriver
from paceline.simulator.faults import Fault
from paceline.task import Batch
from paceline.worker import Worker

Event = tuple[float, int, int, int, Callable[..., None], Any]  # time, worker, sequence number, generation, handler


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """What belongs to one worker: its coroutine, its data, its random times, its faults, its hooks."""

    worker: Worker
    driver: StepDriver
    batches: Iterator[Batch]
    rng: np.random.Generator
    buffers: dict[str, Tensor]
    hooks: HookCalls
    norm: GradientNorm = field(default_factory=GradientNorm)
    generation: int = 0  # rises at every death, so that events of an earlier process are void
    gradients: int = 0  # delivered
    samples: int = 0
    fresh: int = 0  # gradients of this step that have not counted yet
    waiting: int = 0  # the same of finished steps
    issued: int = 0  # gradients asked for
    version: int = 0  # of its own cells, when its step began
    awaits: int = 0
    parked: bool = False
    frozen_until: float = -math.inf
    cut_until: float = -math.inf
    late_until: float = -math.inf
    disturbed_until: float = -math.inf  # no fault delays its events after that
    cuts: dict[int, float] = field(default_factory=dict)  # servers that it cannot reach, and until when
    late_by: float = 0.0
    next_late_by: float = 0.0
    arrivals: list[float] = field(default_factory=lambda: [-math.inf, -math.inf])  # of its last message out, and in
    faults: list[Fault] = field(default_factory=list)
    waits_for: Pending[Any] | None = None
    unread: int = 0  # means that were started, have arrived, and are not awaited yet
    met: bool = False  # it has had a mean in this step
    leaves: str | None = None  # why it leaves after its step


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
