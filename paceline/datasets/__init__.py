"""Real data sets: found or downloaded, compared with their published checksums, and cached.

Each file here that has a function `load` is a data set of that name.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from paceline.errors import UnknownName

Say = Callable[[str], None]


@dataclass(frozen=True)
class Dataset:
    """Tensors to train on and to test on, and where they came from."""

    name: str
    train: tuple[Tensor, ...]
    test: tuple[Tensor, ...]
    path: Path | None  # the folder of its files; None: it came with an installed package
    source: str  # which step gave it, in words
    notice: str | None = None  # printed before a run: a smaller data set replaces this one
    characters: str = ""  # of a text: what the ids mean


def names() -> list[str]:
    """Every data set that `load` knows."""
    files = [found.name.replace("_", "-") for found in pkgutil.iter_modules(__path__)]
    return [name for name in files if hasattr(module(name), "load")]


def module(name: str) -> ModuleType:
    """The file that describes a data set."""
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}")


def load(name: str, directory: str | Path | None = None, *, say: Say | None = None, **options: Any) -> Dataset:
    """The data set `name`, from `directory` or the first other source that has it (see `_published.py`).

    `say` gets messages about slow steps and failures (default: standard error). `options` are the set's own, such as
    `parts` of CIFAR-10.
    """
    known = names()
    if name not in known:
        raise UnknownName("data set", name, known)
    found: Dataset = module(name).load(directory, say=say, **options)
    return found
