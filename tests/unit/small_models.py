"""Small models, tasks of them, and their gradients by hand."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from paceline.task import Batch
from paceline.torch_task import TorchTask

DATA = (
    torch.randn(60, 5, generator=torch.Generator().manual_seed(1)),
    torch.arange(60) % 3,
)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))


def task(model=net, **options) -> TorchTask:
    return TorchTask(model, cross_entropy, DATA, **{"batch": 8, **options})


def first_batch(task: TorchTask, rank: int = 0, workers: int = 1) -> Batch:
    return next(task.batches(rank, workers, 0))


def by_hand(module: nn.Module, batch: Batch) -> tuple[float, torch.Tensor]:
    parameters = [p for p in module.parameters() if p.requires_grad]
    loss = cross_entropy(module(*batch.data[:-1]), batch.data[-1])
    grads = torch.autograd.grad(loss, parameters)
    return loss.item(), torch.cat([g.reshape(-1) for g in grads])
