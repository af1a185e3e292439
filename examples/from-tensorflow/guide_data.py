"""The data of the guides' networks, as keywords of KerasTask and TensorFlowTask. No file of its own to train.

MNIST and CIFAR-10 come from paceline.datasets: a folder that PACELINE_DATA names, the cache, or the network. Without
any of them enlarged small digits take MNIST's place, and the run says so; CIFAR-10 has task.synthetic=1000.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.datasets import load


def mnist(*shape: int) -> dict[str, Any]:
    """Pictures of this shape, with pixels from 0 to 1, and their digits."""

    def prepare(pictures: Tensor, digits: Tensor) -> tuple[Tensor, Tensor]:
        return pictures.reshape(-1, *shape).float() / 255, digits

    found = load("mnist")
    return {"train": found.train, "test": found.test, "prepare": prepare, "notice": found.notice, "batch": 100}


def cifar(parts: int, synthetic: int) -> dict[str, Any]:
    """Pictures (32, 32, 3), each standardised by itself, from the first `parts` of five files; or made-up ones."""
    if synthetic:
        train, test = made_up(synthetic, 0), made_up(max(synthetic // 5, 1), 1)
    else:
        found = load("cifar", parts=parts)
        train, test = found.train, found.test
    return {"train": train, "test": test, "prepare": standardised, "batch": 100}


def standardised(pictures: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    pixels = pictures.permute(0, 2, 3, 1).float().flatten(1)
    spread = pixels.std(1, correction=0, keepdim=True).clamp(min=pixels.shape[1] ** -0.5)
    return ((pixels - pixels.mean(1, keepdim=True)) / spread).reshape(-1, 32, 32, 3), labels


def made_up(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Each class has a colour; pixels vary around it."""
    chance = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 10
    shades = torch.randint(0, 256, (10, 3, 1, 1), generator=torch.Generator().manual_seed(9))
    noise = torch.randint(-40, 40, (count, 3, 32, 32), generator=chance)
    return (shades[labels] + noise).clamp(0, 255).byte(), labels
