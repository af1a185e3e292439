"""The norm of a worker's gradients, for the people who watch a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from paceline.state import Vector


@dataclass(slots=True)
class GradientNorm:
    """A norm costs a pass over the gradient: it is measured only once somebody has asked."""

    asked: bool = False
    value: float = math.nan

    def read(self) -> float:
        """The norm that was measured last; the next gradient is measured again."""
        self.asked = True
        return self.value

    def measure(self, g: Vector) -> None:
        self.asked, self.value = False, torch.linalg.vector_norm(g.detach()).item()
