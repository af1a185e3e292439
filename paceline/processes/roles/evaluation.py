"""Evaluates vectors and checkpoints on the device of a process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from paceline.processes.memory import snapshot
from paceline.runs.checkpoint import Checkpoint
from paceline.state import Vector
from paceline.task import Task


class Evaluation:
    """`turn` is held while the task computes: workers of one process share its model."""

    def __init__(self, task: Task, device: torch.device, turn: AbstractContextManager[Any] | None = None) -> None:
        self._task, self._device, self._turn = task, device, turn or nullcontext()

    def of(self, x: Vector, buffers: Mapping[str, Tensor]) -> dict[str, float]:
        """Metrics of a vector."""
        there = {name: buffer.to(self._device) for name, buffer in buffers.items()}
        with self._turn:
            return self._task.evaluate(x.to(self._device), there or None)

    def of_checkpoint(self, saved: Checkpoint) -> dict[str, float]:
        return self.of(saved.tensors["model"], snapshot.saved_buffers(saved))
