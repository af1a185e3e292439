"""Checks of the options of tasks."""

from collections.abc import Callable, Mapping

import torch

from paceline.errors import UsageError


def whole(low: int, **options: int) -> None:
    """UsageError unless every option is a whole number of at least `low`."""
    _check(options, int, lambda value: value >= low, f"a whole number of at least {low}")


def fraction(**options: float) -> None:
    """UsageError unless every option is from 0 to 1."""
    _check(options, float, lambda value: 0 <= value <= 1, "from 0 to 1")


def finite(kind: torch.dtype, **options: float) -> None:
    """UsageError unless `kind` can hold every option."""
    most = torch.finfo(kind).max
    _check(options, float, lambda value: abs(value) <= most, f"a finite {_name(kind)} number")


def at_least(low: float, kind: torch.dtype, **options: float) -> None:
    """UsageError unless every option is at least `low`, and `kind` can hold it."""
    most = torch.finfo(kind).max
    _check(options, float, lambda value: low <= value <= most, f"a finite {_name(kind)} number of at least {low:g}")


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
