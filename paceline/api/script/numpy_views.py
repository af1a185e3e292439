"""Vectors of torch as arrays of numpy in the same memory, which other frameworks read and write."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from paceline.errors import UsageError
from paceline.state import Vector

# names of the numbers that a run can hold; numpy has no bfloat16 of its own, so its bits travel
NUMBERS = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def numbers_of(named: list[tuple[str, str]], what: str) -> torch.dtype:
    """The one kind of number that all parameters (name, kind) are of; UsageError if there is none."""
    odd = next((pair for pair in named if pair[1] not in NUMBERS), None)
    if odd is not None:
        raise UsageError(f"{what} has {odd[0]} of {odd[1]}: only floating-point parameters can be trained")
    kinds = sorted({kind for _, kind in named})
    if len(kinds) > 1:
        raise UsageError(f"{what} mixes parameters of {', '.join(kinds)}; one flat vector needs one kind")
    return NUMBERS[kinds[0]]


def array_of(vector: Vector, kind: Any) -> np.ndarray[Any, Any]:
    """The vector as an array in the same memory; `kind`: of its numbers, as another library calls it."""
    vector = vector.detach()
    if vector.dtype == torch.bfloat16:
        return vector.view(torch.int16).numpy().view(kind)
    return vector.numpy()


def copy_into(vector: Vector, first: int, array: np.ndarray[Any, Any]) -> None:
    """Copy an array's numbers into the vector, from the index `first` on."""
    part = vector.detach()[first : first + array.size]
    if part.dtype == torch.bfloat16:
        part.view(torch.int16).numpy()[:] = array.reshape(-1).view(np.int16)
    else:
        part.numpy()[:] = array.reshape(-1)
