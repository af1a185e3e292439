"""A worker's place in the simulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

from paceline.ops import Op
from paceline.runtime.step_driver import StepDriver
from paceline.simulator.faults import Fault
from paceline.task import Batch
from paceline.worker import Worker


class SimulatedWorker:
    """What belongs to one worker: its coroutine, its data, its random times, its faults, its hooks."""

    __slots__ = (
        "after_gradient",
        "after_step",
        "arrivals",
        "awaits",
        "batches",
        "before_step",
        "buffers",
        "cut_until",
        "cuts",
        "disturbed_until",
        "driver",
        "faults",
        "feed",
        "fresh",
        "frozen_until",
        "generation",
        "gradients",
        "guards_loss",
        "issued",
        "late_by",
        "late_until",
        "leaves",
        "next_late_by",
        "parked",
        "rng",
        "samples",
        "version",
        "waiting",
        "waits_for",
        "worker",
    )

    def __init__(self, worker: Worker, driver: StepDriver, batches: Iterator[Batch], rng: np.random.Generator) -> None:
        self.worker = worker
        self.driver = driver
        self.batches = batches
        self.buffers: dict[str, Tensor] = {}
        self.rng = rng
        self.generation = 0  # rises at every death, so that events of a former life are void
        self.gradients = 0  # delivered
        self.samples = 0
        self.fresh = self.waiting = 0  # gradients of this step, and of finished ones, that have not counted yet
        self.issued = 0  # asked for
        self.version = 0  # of its own cells, when its step began
        self.awaits = 0
        self.parked = False
        self.frozen_until = self.cut_until = self.late_until = -math.inf
        self.disturbed_until = -math.inf  # none of this holds anything up after that
        self.cuts: dict[int, float] = {}  # servers that it cannot reach, each with the time until then
        self.late_by = self.next_late_by = 0.0
        self.arrivals = [-math.inf, -math.inf]  # of the last message that it sent, that it was sent
        self.faults: list[Fault] = []
        self.waits_for: Op[Any] | None = None
        self.before_step: list[Callable[[], None]] = []
        self.after_step: list[Callable[[], None]] = []
        self.feed: list[Callable[[Batch], Batch]] = []  # these two only of hooks that have them
        self.after_gradient: list[Callable[[float], None]] = []
        self.guards_loss = False  # a hook decides what a loss that is not finite means
        self.leaves: str | None = None  # why it says goodbye after its step
