"""What tasks share: the task of an image classifier, and checks of options."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from paceline.datasets import Dataset
from paceline.errors import UsageError
from paceline.task import Task
from paceline.torch_task import TorchTask, accuracy


def classifier(name: str, data: Dataset, model: Callable[[], nn.Module], test_size: int = 0, **options: Any) -> Task:
    """A model that classifies images. `options` are those of TorchTask."""
    test = tuple(part[:test_size] if test_size else part for part in data.test)
    options = {"name": name, "metrics": {"accuracy": accuracy}, "notice": data.notice, "batch": 100} | options
    return TorchTask(model, nn.functional.cross_entropy, data.train, test, **options)


def whole(low: int, **options: int) -> None:
    """UsageError unless every option is a whole number of at least `low`."""
    _check(options, int, lambda value: value >= low, f"a whole number of at least {low}")


def fraction(**options: float) -> None:
    """UsageError unless every option is from 0 to 1."""
    _check(options, float, lambda value: 0 <= value <= 1, "from 0 to 1")


def real(kind: torch.dtype, low: float | None = None, **options: float) -> None:
    """UsageError unless every option is at least `low`, and `kind` can hold it."""
    most = torch.finfo(kind).max
    least, words = (-most, "") if low is None else (low, f" of at least {low:g}")
    _check(options, float, lambda value: least <= value <= most, f"a finite {_name(kind)} number{words}")


def positive(kind: torch.dtype, **options: float) -> None:
    """UsageError unless every option is above 0, and `kind` can hold it."""
    least, most = torch.finfo(kind).tiny, torch.finfo(kind).max
    _check(options, float, lambda value: least <= value <= most, f"a finite {_name(kind)} number above 0")


def _check(options: Mapping[str, float], of: type, fits: Callable[[float], bool], allowed: str) -> None:
    for name, value in options.items():
        typed = isinstance(value, int if of is int else int | float) and not isinstance(value, bool)
        if not typed or not fits(value):
            raise UsageError(f"{name} must be {allowed}, not {value!r}")


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")
