"""The slice of the system tests that `make test` runs names tests that are there."""

from __future__ import annotations

import pytest


def test_every_name_of_the_slice_is_a_test(absent: frozenset[str], pytestconfig: pytest.Config) -> None:
    if pytestconfig.option.markexpr != "not long":
        pytest.skip("only the run of the slice itself collects all of it")
    assert not absent
