"""Small tasks of random numbers: a plain one, one with buffers (BatchNorm) and randomness of its own (dropout), and one
with a long vector, in which a kill often finds a server inside a call.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from paceline import TorchTask


def _task(name: str, *layers: nn.Module, width: int = 8) -> TorchTask:
    inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    labels = (inputs.sum(1) * 2).long() % 3

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, width), *layers, nn.ReLU(), nn.Linear(width, 3))

    return TorchTask(model, cross_entropy, (inputs, labels), batch=16, name=name)


def plain() -> TorchTask:
    return _task("plain")


def normed() -> TorchTask:
    return _task("normed", nn.BatchNorm1d(8), nn.Dropout(0.2))


def wide() -> TorchTask:
    return _task("wide", width=20_000)
