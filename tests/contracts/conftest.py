"""Every test here that asks for `name` runs once for each scheme that `find` finds."""

from __future__ import annotations

import pytest

from paceline import find


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", list(find.schemes()))
