"""Real data sets: found or fetched, checked against the published sums, and kept.

Each file here that has a function `load` is a data set of that name.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from paceline.datasets._dataset import Dataset, Say
from paceline.errors import UnknownName

__all__ = ["Dataset", "load", "module", "names"]


def names() -> list[str]:
    """Every data set that `load` knows."""
    files = [found.name.replace("_", "-") for found in pkgutil.iter_modules(__path__)]
    return [name for name in files if hasattr(module(name), "load")]


def module(name: str) -> ModuleType:
    """The file that describes a data set."""
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}")


def load(name: str, directory: str | Path | None = None, *, say: Say | None = None, **options: Any) -> Dataset:
    """The data set `name`, from `directory` or the first other source that has it (see `published.py`).

    `say` is told what takes time or went wrong (by default: standard error). `options` are the set's own,
    such as `parts` of CIFAR-10.
    """
    known = names()
    if name not in known:
        raise UnknownName("data set", name, known)
    return cast(Dataset, module(name).load(directory, say=say, **options))
