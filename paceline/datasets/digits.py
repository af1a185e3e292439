"""1,797 handwritten digits of 8 x 8 pixels, which come with scikit-learn (Alpaydin and Kaynak, UCI, 1998)."""

from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.datasets import Dataset, Say
from paceline.sampling import mixed, permute

TEST = 360
SOURCE = "scikit-learn's own copy"


def load(directory: str | Path | None = None, *, say: Say | None = None) -> Dataset:
    """Images (n, 8, 8) of 0 to 16 as uint8, labels; 1,437 to train on, 360 to test, always the same."""
    images, labels = _read()
    train, test = split(len(labels), TEST)
    return Dataset("digits", (images[train], labels[train]), (images[test], labels[test]), None, SOURCE)


@cache
def _read() -> tuple[Tensor, Tensor]:
    """All images and labels: parsed once, for it is a text file. `load` gives copies of their rows."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.from_numpy(found.images.astype(np.uint8)), torch.from_numpy(found.target.astype(np.int64))


def split(n: int, test: int) -> tuple[Tensor, Tensor]:
    """Which of n samples to train on and which to test: drawn at random, because a stored order seldom is."""
    places = np.arange(n, dtype=np.uint64)
    order = permute(places, n, np.array([mixed("split", n)], np.uint64)).astype(np.int64)
    drawn = torch.from_numpy(order)
    return drawn[test:].sort().values, drawn[:test].sort().values
