"""Runs a test once for each scheme that is found, by the name of its parameter."""

from __future__ import annotations

import pytest

from paceline.config import discovery


def over_schemes(metafunc: pytest.Metafunc) -> None:
    """`name`: each scheme; `team`: each that takes several workers; `unordered`: each of those whose order is not
    fixed."""
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", list(discovery.schemes()))
    if "team" in metafunc.fixturenames:
        metafunc.parametrize("team", [name for name, found in discovery.schemes().items() if not found.value.alone])
    if "unordered" in metafunc.fixturenames:
        found = {name: one.value for name, one in discovery.schemes().items() if not one.value.alone}
        metafunc.parametrize("unordered", [name for name, one in found.items() if one().exact(3) is not None])
