"""A test here that asks for `name` runs once for each scheme; for `team`, for each that takes several workers; for
`unordered`, for each of those whose order is not fixed; for `launcher`, for each launcher.

The tests of faults, processes, repeats, counted work and all update rules cost seconds for each scheme. `make test` has
them for a scheme of every kind, `make test-long` for all. Those in real processes are there for a scheme of every kind
too, and for all in `make matrix`.
"""

from __future__ import annotations

import pytest
from beds.samples_of_cases import of_a_kind
from beds.scheme_cases import over_schemes

from paceline.config import discovery

COSTLY = {
    *("test_every_scheme_under_faults", "test_every_scheme_in_processes"),
    *("test_every_scheme_repeats", "test_every_scheme_counts_work"),
    "test_every_rule_runs_or_is_refused_before_the_run",
}
REAL = "test_every_scheme_in_processes"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    over_schemes(metafunc)
    if "launcher" in metafunc.fixturenames:
        metafunc.parametrize("launcher", list(discovery.readable("launchers")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        given = getattr(item, "callspec", None)
        if given is None or not {item.path.stem, item.originalname} & COSTLY:
            continue
        if not of_a_kind(item):
            item.add_marker(pytest.mark.matrix if item.path.stem == REAL else pytest.mark.long)
