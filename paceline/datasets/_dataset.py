"""What a data set is once it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

Say = Callable[[str], None]


@dataclass(frozen=True)
class Dataset:
    """Tensors to train on and to test on, and where they came from."""

    name: str
    train: tuple[Tensor, ...]
    test: tuple[Tensor, ...]
    path: Path | None  # where it lies; None: it came with an installed package
    source: str  # which step gave it, in words
    notice: str | None = None  # to be said aloud: something smaller stands in
    characters: str = ""  # of a text: what the ids mean
