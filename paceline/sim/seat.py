"""A worker's place in the simulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

from paceline.drive import Driver
from paceline.ops import Op
from paceline.sim.faults import Fault
from paceline.task import Batch
from paceline.worker import Worker


class Seat:
    """What belongs to one worker: its coroutine, its data, its random times, its faults, its hooks."""

    __slots__ = (
        "after_gradient",
        "after_step",
        "awaits",
        "batches",
        "before_step",
        "buffers",
        "cut_until",
        "driver",
        "faults",
        "feed",
        "frozen_until",
        "generation",
        "gradients",
        "guards_loss",
        "issued",
        "leaves",
        "parked",
        "rng",
        "waits_for",
        "worker",
    )

    def __init__(self, worker: Worker, driver: Driver, batches: Iterator[Batch], rng: np.random.Generator) -> None:
        self.worker = worker
        self.driver = driver
        self.batches = batches
        self.buffers: dict[str, Tensor] = {}
        self.rng = rng
        self.generation = 0  # rises at every death, so that events of a former life are void
        self.gradients = 0  # delivered
        self.issued = 0  # asked for
        self.awaits = 0
        self.parked = False
        self.frozen_until = self.cut_until = -math.inf
        self.faults: list[Fault] = []
        self.waits_for: Op[Any] | None = None
        self.before_step: list[Callable[[], None]] = []
        self.after_step: list[Callable[[], None]] = []
        self.feed: list[Callable[[Batch], Batch]] = []  # these two only of hooks that have them
        self.after_gradient: list[Callable[[float], None]] = []
        self.guards_loss = False  # a hook decides what a loss that is not finite means
        self.leaves: str | None = None  # why it says goodbye after its step
