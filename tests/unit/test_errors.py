"""The tree of errors, as drawn in errors.py, and what a shell learns of each."""

from __future__ import annotations

import inspect
import re

import pytest

from paceline import errors
from paceline.errors import (
    DataError,
    Deadlock,
    LossError,
    PacelineError,
    RunError,
    SchemeError,
    UnknownName,
    UsageError,
)


def test_the_drawing_is_the_tree() -> None:
    drawn = set(re.findall(r"^[│├└─ ]*([A-Z]\w+)(?= {3}|$)", errors.__doc__ or "", re.MULTILINE))
    made = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert drawn == made
    assert all(issubclass(getattr(errors, name), PacelineError) for name in made)


@pytest.mark.parametrize(
    ("error", "code"),
    [(UsageError, 2), (DataError, 3), (RunError, 1), (SchemeError, 1), (LossError, 1), (Deadlock, 1)],
)
def test_exit_codes(error: type[PacelineError], code: int) -> None:
    assert error("…").exit_code == code


def test_an_unknown_name_suggests_or_lists() -> None:
    assert str(UnknownName("scheme", "downpor", ["sync", "downpour"])) == (
        "no scheme 'downpor'; did you mean 'downpour'?"
    )
    assert str(UnknownName("scheme", "zzz", ["sync", "async"])) == "no scheme 'zzz'; there are: async, sync"
    assert str(UnknownName("scheme", "zzz", [])) == "no scheme 'zzz'; there are: none"
    assert UnknownName("scheme", "zzz", []).exit_code == 2
    assert RunError("…").result is None
