"""Formulas of schemes are arithmetic, and nothing else."""

from __future__ import annotations

import pytest

from paceline.errors import SchemeError
from paceline.formula import evaluated


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2.0),
        ("2 / window", 0.4),
        ("1 / (n_push or window) + 1 / (n_fetch or window)", 0.7),
        ("2 * (workers - 1) / workers", 1.5),
        ("max(1, window) - min(workers, 2)", 3.0),
    ],
)
def test_arithmetic_of_fields(text: str, value: float) -> None:
    assert evaluated(text, {"window": 5, "n_push": 2, "n_fetch": None, "workers": 4}) == pytest.approx(value)


@pytest.mark.parametrize("text", ["windows", "window ** 2", "open('x')", "window.real", "[1]"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(SchemeError, match="is no arithmetic of window"):
        evaluated(text, {"window": 5})
