"""Wisconsin breast cancer: 569 tumours by 30 measures, benign or not (Wolberg, Street, Mangasarian, 1995)."""

from pathlib import Path

import numpy as np
import torch

from paceline.datasets import Dataset, Say
from paceline.datasets.digits import SOURCE, split

TEST = 114


def load(directory: str | Path | None = None, *, say: Say | None = None) -> Dataset:
    """Measures (n, 30) as float64, standardised by the training samples; labels 0 (malignant) or 1 (benign)."""
    from sklearn.datasets import load_breast_cancer

    found = load_breast_cancer()
    measures = torch.from_numpy(np.ascontiguousarray(found.data, dtype=np.float64))
    labels = torch.from_numpy(found.target.astype(np.int64))
    train, test = split(len(labels), TEST)
    spread, mean = torch.std_mean(measures[train], 0, correction=0)
    measures = (measures - mean) / spread
    return Dataset("breast-cancer", (measures[train], labels[train]), (measures[test], labels[test]), None, SOURCE)
