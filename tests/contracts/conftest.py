"""A test here that asks for `name` runs once for each scheme; for `team`, for each that takes several workers; for
`launcher`, for each launcher."""

from __future__ import annotations

import pytest

from paceline.config import discovery


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", list(discovery.schemes()))
    if "team" in metafunc.fixturenames:
        metafunc.parametrize("team", [name for name, found in discovery.schemes().items() if not found.value.alone])
    if "launcher" in metafunc.fixturenames:
        metafunc.parametrize("launcher", list(discovery.readable("launchers")))
