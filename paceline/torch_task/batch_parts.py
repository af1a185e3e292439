"""What a mini-batch is made of: tensors in a tuple, the last one the target, or tensors by name in one dictionary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from paceline.errors import UsageError

Parts = tuple[Any, ...]


def parts_of(collated: Any) -> Parts:
    """A collated batch as a tuple; a dictionary is its only part."""
    if isinstance(collated, Mapping):
        named = dict(collated)
        for name, value in named.items():
            if not _usable(value):
                raise UsageError(
                    f"the batch's {name!r} is a {type(value).__name__}, which no model takes: remove it from the "
                    "samples, or give a collate function"
                )
        return (named,)
    parts = tuple(collated) if isinstance(collated, tuple | list) else (collated,)
    if not all(_usable(part) for part in parts):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise UsageError(
            f"a sample must be a tuple of tensors or numbers, or a dictionary of them; collated it is {kinds}: "
            "give a collate function"
        )
    return parts


def named(parts: Parts) -> dict[str, Any] | None:
    """The dictionary of a batch; None if its parts are in a tuple."""
    return parts[0] if len(parts) == 1 and isinstance(parts[0], dict) else None


def tensors_in(parts: Any) -> Iterator[Tensor]:
    """Every tensor of a batch, in order."""
    if isinstance(parts, Tensor):
        yield parts
    elif isinstance(parts, Mapping | tuple | list):
        for part in parts.values() if isinstance(parts, Mapping) else parts:
            yield from tensors_in(part)


def mapped(function: Callable[[Tensor], Tensor], part: Any) -> Any:
    """A part with `function` of each of its tensors in their place."""
    if isinstance(part, Tensor):
        return function(part)
    if isinstance(part, Mapping):
        return {name: mapped(function, value) for name, value in part.items()}
    if type(part) in (tuple, list):
        return type(part)(mapped(function, one) for one in part)
    return part


def size_of(parts: Any) -> int:
    """The number of samples: the length of the first tensor."""
    first = next((one for one in tensors_in(parts) if one.dim()), None)
    return 1 if first is None else len(first)


def cut(parts: Parts, first: int, last: int) -> Parts:
    """Some samples of a batch."""
    result: Parts = mapped(lambda one: one[first:last] if one.dim() else one, parts)
    return result


def _usable(part: Any) -> bool:
    if isinstance(part, Tensor) or hasattr(part, "to"):
        return True
    if isinstance(part, Mapping):
        return all(_usable(one) for one in part.values())
    return isinstance(part, tuple | list) and all(_usable(one) for one in part)


def placed(part: Any, device: Any) -> Any:
    """A part on a device; an object that is no tensor moves itself by `to`."""
    if isinstance(part, Tensor):
        return part.to(device, non_blocking=True)
    if hasattr(part, "to"):
        return part.to(device)
    if isinstance(part, Mapping):
        return {name: placed(value, device) for name, value in part.items()}
    return type(part)(placed(one, device) for one in part)
