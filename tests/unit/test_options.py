"""An option is declared once: the command line, the Python functions and the plan agree with the declaration."""

from __future__ import annotations

import dataclasses
import inspect
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from paceline.api.simulate import OBJECTS, simulate
from paceline.api.train import train
from paceline.cli.commands import COMMANDS, Command, TrainOptions
from paceline.cli.signature import options_of
from paceline.config.options import COUNT, POSITIVE, Declared, checked, declared, option, without_effect
from paceline.config.plan import Plan
from paceline.config.simulation import Simulation
from paceline.errors import UsageError

# arguments of `train` whose default is not the plan's: None means that the scheme or `exact` decides
DECIDED_LATER = {"workers", "micro", "quorum"}


def without_none(hint: Any) -> Any:
    if type(None) in get_args(hint):
        return next(one for one in get_args(hint) if one is not type(None))
    return hint


@pytest.mark.parametrize("one", declared(Plan).values(), ids=lambda one: one.name)
def test_train_has_every_option_as_an_argument(one: Declared) -> None:
    argument = inspect.signature(train).parameters[one.argument]
    if one.name in ("hooks", "compress"):  # from Python they may be objects
        return
    assert without_none(get_type_hints(train)[one.argument]) == one.kind
    if one.name in DECIDED_LATER:
        assert argument.default is None
    elif one.name != "steps":  # 1000 unless something else ends the run
        assert argument.default == one.default


@pytest.mark.parametrize("one", declared(Simulation).values(), ids=lambda one: one.name)
def test_simulate_has_every_option_as_an_argument(one: Declared) -> None:
    argument = inspect.signature(simulate).parameters[one.argument]
    if one.name not in OBJECTS and one.name != "speeds":
        assert get_type_hints(simulate)[one.argument] == one.hint
    if one.default != []:
        assert argument.default == one.default


def test_the_functions_have_no_other_settings() -> None:
    """What is no option of the command line is an object, or the business of Python alone."""
    python = {"task", "scheme", "task_options", "say", "watch", "hyper", "optimizer", "schedule", "schedule_unit"}
    arguments = {one.argument for one in declared(Plan).values()}
    assert inspect.signature(train).parameters.keys() == arguments | python | {"directory", "resume"}
    arguments = {one.argument for one in declared(Simulation).values()}
    assert inspect.signature(simulate).parameters.keys() == arguments | python | {"warn"}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
class TestCommands:
    def test_its_body_exists_and_takes_what_is_declared(self, command: Command) -> None:
        module, _, name = command.body.partition(":")
        body = getattr(import_module(module), name)
        taken = list(get_type_hints(body).values())
        assert taken[0] is command.options
        assert len(inspect.signature(body).parameters) == (1 if command.settings is None else 2)

    def test_no_flag_stands_for_two_options(self, command: Command) -> None:
        flags = [flag for one in options_of(command) for both in one.flags for flag in both.split("/")]
        assert len(flags) == len(set(flags))

    def test_every_option_has_a_text_of_its_own(self, command: Command) -> None:
        for one in options_of(command):
            assert one.option.help or one.option.hidden, one.name
            assert not one.option.page or (Path("docs") / one.option.page.partition("#")[0]).is_file()


def test_a_run_takes_the_options_that_say_so() -> None:
    (run,) = [command for command in COMMANDS if command.name == "run"]
    names = {one.name for one in options_of(run)} & declared(Plan).keys()
    assert {"servers", "steps", "patience", "keep", "hooks"} <= names
    assert not names & {"batch", "seed", "evaluator", "collective"}


@dataclasses.dataclass
class Sample:
    count: int | None = option(None, "A count.", bound=COUNT)
    rates: tuple[float, ...] = option((), "Rates.")
    files: list[Path] = option([], "Files.", flags="--file")
    later: float = option(1.0, "Later.", argument="start_later", bound=POSITIVE)
    plain: str = ""


def test_texts_become_what_is_declared() -> None:
    texts = {"count": "3", "rates": "1,0.5", "files": ["a", "b"], "plain": "x"}
    made = Sample(**checked("sample", Sample, texts))
    assert made == Sample(3, (1.0, 0.5), [Path("a"), Path("b")], 1.0, "x")
    assert set(declared(Sample)) == {"count", "rates", "files", "later"}
    assert declared(Sample)["files"].flag == "--file"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"count": "x"}, "sample: count must be a whole number, not 'x'"),
        ({"count": 0}, "sample: count must be at least 1, not 0"),
        ({"later": 0}, "sample: start_later must be above 0, not 0"),
        ({"later": float("nan")}, "sample: start_later must be above 0, not nan"),
    ],
)
def test_others_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        checked("sample", Sample, given)
    assert str(caught.value) == told


def test_the_fingerprint_has_every_setting_that_can_change_a_bit() -> None:
    """A new field of the plan is in the fingerprint unless it says otherwise."""
    kept = {one.name for one in dataclasses.fields(Plan)} - without_effect(Plan)
    assert kept == {
        *("task", "task_options", "batch", "feed", "shuffle", "scheme", "hyper", "workers", "servers", "steps"),
        *("seconds", "seed", "hooks", "compress", "exact", "micro", "inside", "quorum", "device", "threads", "script"),
    }


def test_help_says_the_default_once() -> None:
    for cls in (Plan, Simulation, TrainOptions):
        for one in declared(cls).values():
            assert "efault" not in one.option.help
