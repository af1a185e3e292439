"""Real data sets: found or fetched, checked against the published sums, and kept.

Each file here that has a function `load` is a data set of that name.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any, cast

from paceline.data.dataset import Dataset, Say
from paceline.errors import UnknownName

__all__ = ["Dataset", "load", "names"]


def names() -> list[str]:
    """Every data set that `load` knows."""
    modules = [module.name for module in pkgutil.iter_modules(__path__)]
    return [name.replace("_", "-") for name in modules if hasattr(_module(name), "load")]


def load(name: str, directory: str | Path | None = None, *, say: Say | None = None, **options: Any) -> Dataset:
    """The data set `name`, from `directory` or the first other source that has it (see `published.py`).

    `say` is told what takes time or went wrong (by default: standard error). `options` are the set's own,
    such as `parts` of CIFAR-10.
    """
    known = names()
    if name not in known:
        raise UnknownName("data set", name, known)
    return cast(Dataset, _module(name.replace("-", "_")).load(directory, say=say, **options))


def _module(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")
