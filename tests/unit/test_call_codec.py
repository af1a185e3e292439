"""Calls as numbers: what goes in comes out, and what cannot cross is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

from paceline.errors import SchemeError
from paceline.processes.memory.call_codec import DTYPES, MOST, decode, encode


def crossed(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Encoded and decoded; tensors wait in a list meanwhile."""
    places: list[Tensor] = []

    def place(tensor: Tensor) -> int:
        places.append(tensor)
        return len(places) - 1

    def tensor(at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        assert (places[at].dtype, places[at].shape) == (dtype, shape)
        return places[at]

    return decode(encode(values, place).tolist(), tensor)


numbers = some.integers(-(1 << 63), (1 << 63) - 1) | some.floats(allow_nan=False) | some.booleans() | some.none()
plain = numbers | some.text(max_size=40)
nested = some.recursive(plain, lambda inner: some.lists(inner, max_size=3).map(tuple), max_leaves=12)


@given(some.lists(nested, max_size=6).map(tuple))
def test_values_come_out_as_they_went_in(values: tuple[Any, ...]) -> None:
    out = crossed(values)
    assert out == values
    assert kinds(out) == kinds(values)


def kinds(value: Any) -> Any:
    return [kinds(item) for item in value] if isinstance(value, tuple) else type(value)


def test_every_bit_of_a_number() -> None:
    assert math.isnan(crossed((math.nan,))[0])
    assert math.copysign(1.0, crossed((-0.0,))[0]) == -1.0
    assert crossed((math.inf, 5e-324)) == (math.inf, 5e-324)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_kind(dtype: torch.dtype) -> None:
    for shape in ((), (3,), (2, 0), (2, 3, 4)):
        tensor = torch.zeros(shape, dtype=dtype)
        before, found, after = crossed((1, tensor, ("a", tensor)))
        assert found is tensor
        assert (before, after) == (1, ("a", tensor))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1 << 63, "more than 64 bits"),
        (-(1 << 63) - 1, "more than 64 bits"),
        ("x" * 2049, "too long"),
        ([1, 2], "a list cannot cross"),
        ({"a": 1}, "a dict cannot cross"),
        (lambda: 1, "a function cannot cross"),
        (torch.zeros(1, dtype=torch.complex64), "complex64 cannot cross"),
        (tuple(range(MOST)), "carries too much"),
    ],
    ids=["above", "below", "long", "list", "dict", "function", "complex", "many"],
)
def test_what_cannot_cross_is_refused(value: Any, said: str) -> None:
    with pytest.raises(SchemeError, match=said):
        crossed((value,))
