"""Digits classified by networks with one hidden layer."""

import torch
from torch import Tensor, nn

from paceline.datasets import Dataset, load
from paceline.task import Task
from paceline.tasks._options import classifier, whole
from paceline.tasks.toy import dtype_named
from paceline.torch_task.random_numbers import draws_nothing


def _mlp(name: str, data: Dataset, hidden: int, brightest: int, batch: int, kind: torch.dtype) -> Task:
    pixels = data.train[0][0].numel()

    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(pixels, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    @draws_nothing
    def prepare(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return images.to(kind, copy=True).div_(brightest), labels

    return classifier(name, data, model, batch=batch, prepare=prepare, dtype=kind)


def digits_mlp(hidden: int = 32, dtype: str = "float32") -> Task:
    """Digits of 8 x 8 pixels, a network of 64-32-10: trains in seconds, needs no download.

    Data: scikit-learn's 1,797 digits, 1,437 of them to train on. One hidden layer of `hidden` ReLU units.
    """
    whole(1, hidden=hidden)
    return _mlp("digits-mlp", load("digits"), hidden, 16, 32, dtype_named(dtype))


def mnist_mlp(hidden: int = 128, dtype: str = "float32", data: str = "") -> Task:
    """MNIST, a network of 784-128-10.

    Data: LeCun, Cortes, Burges; 60,000 images to train on and 10,000 to test, from the folder `data` or
    the first source that has them. One hidden layer of `hidden` ReLU units; pixels from 0 to 1.
    """
    whole(1, hidden=hidden)
    kind = dtype_named(dtype)  # before the download
    return _mlp("mnist-mlp", load("mnist", data or None), hidden, 255, 100, kind)
