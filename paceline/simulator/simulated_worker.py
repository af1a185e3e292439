"""A worker's place in the simulator."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from paceline.ops import Op
from paceline.runtime.hook_calls import HookCalls
from paceline.runtime.step_driver import StepDriver
from paceline.simulator.faults import Fault
from paceline.task import Batch
from paceline.worker import Worker


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """What belongs to one worker: its coroutine, its data, its random times, its faults, its hooks."""

    worker: Worker
    driver: StepDriver
    batches: Iterator[Batch]
    rng: np.random.Generator
    buffers: dict[str, Tensor]
    hooks: HookCalls
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
    waits_for: Op[Any] | None = None
    leaves: str | None = None  # why it leaves after its step
