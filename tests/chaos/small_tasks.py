"""Two small tasks of random numbers: with and without buffers (BatchNorm) and randomness of their own (dropout)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from paceline import TorchTask


def _task(name: str, *layers: nn.Module) -> TorchTask:
    inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    labels = (inputs.sum(1) * 2).long() % 3

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), *layers, nn.ReLU(), nn.Linear(8, 3))

    return TorchTask(model, cross_entropy, (inputs, labels), batch=16, name=name)


def plain() -> TorchTask:
    return _task("plain")


def normed() -> TorchTask:
    return _task("normed", nn.BatchNorm1d(8), nn.Dropout(0.2))
