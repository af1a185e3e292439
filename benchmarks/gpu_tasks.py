"""Tasks of gpu.py."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import count
from typing import Any, Self

import torch
from gpt import GPT, Sizes, loss, texts
from torch import Tensor

from paceline.task import Batch, Task
from paceline.torch_task import TorchTask


def gpt(layers: int = 12, width: int = 768, heads: int = 12, context: int = 128, half: bool = True) -> TorchTask:
    """A GPT of 85 M parameters on random tokens, in mixed precision."""
    sizes = Sizes(layers=layers, width=width, heads=heads, context=context)
    return TorchTask(
        lambda: GPT(sizes),
        loss,
        texts(sizes, 1024),
        texts(sizes, 8),
        batch=32,
        name="gpt",
        autocast=torch.bfloat16 if half else None,
    )


class VectorTask(Task):
    """A vector whose gradient costs nothing: what is left of a step is moving it."""

    name, batch, shuffle = "vector", 1, False

    def __init__(self, length: int) -> None:
        self.length, self.device = length, torch.device("cpu")

    def on(self, device: torch.device) -> Self:
        other = copy.copy(self)
        other.device = device
        return other

    def start(self, seed: int) -> Tensor:
        return torch.ones(self.length, device=self.device)

    def batches(self, rank: int, workers: int, seed: int, first: int = 0) -> Iterator[Batch]:
        return (Batch((), 1, number) for number in count(first))

    def grad(self, x: Tensor, batch: Batch, out: Tensor | None = None, buffers: Any = None) -> tuple[float, Tensor]:
        return 0.0, torch.zeros_like(x) if out is None else out

    def evaluate(self, x: Tensor, buffers: Any = None) -> dict[str, float]:
        return {"loss": 0.0}


def vector(length: int = 85_000_000) -> Task:
    """340 MB by default."""
    return VectorTask(length)
