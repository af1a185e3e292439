"""Tasks of startup.py: each notes when its first gradient is finished."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, Sizes, loss, texts
from torch import nn

from paceline.datasets import load
from paceline.torch_task import TorchTask


class Noted(TorchTask):
    noted = False

    def grad(self, *given: Any, **more: Any) -> tuple[float, torch.Tensor]:
        found = super().grad(*given, **more)
        if not self.noted:
            self.noted = True
            with Path(os.environ["PACELINE_STARTUP_NOTES"]).open("a") as file:
                file.write(f"{time.monotonic()}\n")
        return found


def mlp() -> TorchTask:
    """mnist-mlp."""
    data = load("mnist")
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    return Noted(
        model,
        nn.functional.cross_entropy,
        data.train,
        data.test,
        batch=100,
        prepare=lambda images, labels: (images.float() / 255, labels),
    )


def gpt() -> TorchTask:
    """A GPT of 85 M parameters, with a batch so small that the gradient takes little of the time."""
    sizes = Sizes(context=8)
    return Noted(lambda: GPT(sizes), loss, texts(sizes, 8), batch=1, name="gpt")
