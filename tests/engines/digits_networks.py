"""The same small network for handwritten digits in torch, Keras, TensorFlow and JAX, in 64 bits, with one start."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from paceline import TorchTask

SAMPLES, HIDDEN = 600, 16
SHAPES = [(64, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,)]  # as Keras has them: inputs first


def data() -> tuple[np.ndarray, np.ndarray]:
    found = load_digits()
    return (found.data[:SAMPLES] / 16).astype(np.float64), found.target[:SAMPLES].astype(np.int64)


def weights() -> list[np.ndarray]:
    drawn = np.random.default_rng(3)
    return [drawn.normal(size=shape) / 8 for shape in SHAPES]


class Network(nn.Module):
    """Its matrices have the inputs first, as those of the other frameworks: their vectors have one order."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.from_numpy(one) for one in weights())

    def forward(self, x: Tensor) -> Tensor:
        first, bias, second, last = self.weights
        return torch.relu(x @ first + bias) @ second + last


def steps_of(scheme: str) -> int:
    """How long the networks are compared under a scheme."""
    return 50 if scheme in ("sgd", "sync", "async", "aeasgd") else 12


def torch_task(**settings: object) -> TorchTask:
    return TorchTask(Network(), nn.functional.cross_entropy, data(), **settings)
