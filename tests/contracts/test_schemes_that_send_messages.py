"""The contracts of every scheme, for the choice of some to send messages that nobody waits for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import test_every_scheme_repeats as repeats
import test_every_scheme_under_faults as faults
from simulated_runs import different, engine

from paceline.config import discovery

MODULES = (repeats, faults)
SENDING = [
    name
    for name, found in discovery.schemes().items()
    if "any-step" in str(getattr(found.value, "__annotations__", {}).get("partner"))
]
# A worker at its goal takes no more messages, so that a goal on the way changes the run: there is another test below.
# Nobody waits for the dead, whatever the quorum.
OTHERWISE = {"test_a_run_in_pieces_is_the_run", "test_who_waits_for_the_dead_is_told_so"}
LAWS = [
    (module, name)
    for module in MODULES
    for name, test in vars(module).items()
    if name.startswith("test_") and {"name", "team"} & {*inspect.signature(test).parameters} and name not in OTHERWISE
]


def given(test: Callable[..., None]) -> list[dict[str, Any]]:
    """The arguments of a parametrized test."""
    rows: list[dict[str, Any]] = [{}]
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            names = [mark.args[0]] if isinstance(mark.args[0], str) else list(mark.args[0])
            values = [getattr(value, "values", (value,) if len(names) == 1 else value) for value in mark.args[1]]
            rows = [row | dict(zip(names, value, strict=True)) for row in rows for value in values]
    return rows


@pytest.mark.long
@pytest.mark.parametrize("scheme", SENDING)
@pytest.mark.parametrize(("module", "law"), LAWS, ids=[law for _, law in LAWS])
def test_it_holds_for_messages_too(
    scheme: str, module: ModuleType, law: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "engine", lambda name, **given: engine(name, **given, partner="any-step"))
    monkeypatch.setattr(faults, "SELDOM", set(SENDING))  # nobody waits for a message of one that is cut off
    test = getattr(module, law)
    for number, arguments in enumerate(given(test)):
        wanted = inspect.signature(test).parameters
        if "tmp_path" in wanted:
            arguments["tmp_path"] = tmp_path / str(number)
            arguments["tmp_path"].mkdir()
        test(**arguments, **{"name" if "name" in wanted else "team": scheme})


@pytest.mark.parametrize("scheme", SENDING)
def test_a_run_that_is_interrupted_now_and_then_is_the_run(scheme: str) -> None:
    whole, pieces = (engine(scheme, network="latency=0.2", partner="any-step") for _ in range(2))
    whole.run(12)
    for half_seconds in range(1, 10):
        pieces.run(12, seconds=0.5 * half_seconds)
    pieces.run(12)
    assert different(whole, pieces) == []


def test_there_are_such_schemes() -> None:
    assert SENDING == ["ad-psgd", "gosgd"]
