"""Every test here that asks for `name` runs once for each scheme that `find` finds; one that asks for `team`, for each
that takes several workers."""

from __future__ import annotations

import pytest

from paceline.config import discovery


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", list(discovery.schemes()))
    if "team" in metafunc.fixturenames:
        metafunc.parametrize("team", [name for name, found in discovery.schemes().items() if not found.value.alone])
