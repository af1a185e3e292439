"""Checks that every hook must pass. They are plain functions: call them in your tests on a hook of your own.

    from paceline.testing import hooks

    @pytest.mark.parametrize("check", hooks.CHECKS)
    def test_my_hook(check, tmp_path):
        check("my_package.hooks:MyHook:every=2", tmp_path)

A hook is named as in `--hook`, with the options that it needs. The last checks train a small task, in the simulator and
in processes; AssertionError says which promise is broken.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from paceline.api.execute import execute
from paceline.api.simulate import simulate
from paceline.config.build import hook_of
from paceline.config.validate import planned
from paceline.errors import PacelineError, SchemeError, UsageError
from paceline.hook import Hook, Session
from paceline.runs.run_directory import RunDirectory
from paceline.task import Batch

# One letter per call. A run may end inside a step; a hook whose begin raises an error is not ended.
LETTERS = {"begin": "B", "before_step": "s", "feed": "f", "after_gradient": "g", "after_step": "a"}
LETTERS |= {"failed": "F", "end": "E"}
LIFE = re.compile(r"B|B(s(fg)*a)*(s(fg)*f?)?F?E")
STEPS, LR = 8, 0.001


def check_declaration(hook: str, directory: Path) -> None:
    """`paceline list` and `show` can describe it: a dataclass with a name, roles and a sentence."""
    made = hook_of(hook)
    assert dataclasses.is_dataclass(made), f"{type(made).__name__} is no dataclass"
    assert re.fullmatch(r"[a-z][a-z0-9-]*", made.name), f"{made.name!r} is no name for --hook"
    assert made.roles, "it has no role: no worker would run it"
    assert made.roles <= {"chief", "worker"}, f"unknown roles: {set(made.roles)}"
    first = (inspect.getdoc(type(made)) or "").partition("\n\n")[0]
    assert first.endswith("."), "its docstring does not begin with a sentence"
    assert not first.startswith(f"{type(made).__name__}("), "it has no docstring"


def check_options(hook: str, directory: Path) -> None:
    """An unknown option is refused with the one that was probably meant, a wrong value with the name of its option."""
    separator = "," if "=" in hook else ":"
    for field in dataclasses.fields(hook_of(hook)):  # type: ignore[arg-type]
        refusal = _refusal(f"{hook}{separator}{field.name}x=1")
        assert f"did you mean {field.name!r}" in refusal, f"{field.name}x=1: {refusal or 'accepted'}"
        if isinstance(field.default, int | float) and field.name not in hook:
            refusal = _refusal(f"{hook}{separator}{field.name}=wrong")
            assert field.name in refusal, f"{field.name}=wrong: {refusal or 'accepted'}"


def check_order_in_the_simulator(hook: str, directory: Path) -> None:
    """begin, then steps, then end, for each worker. A hook that needs processes says so in a UsageError."""
    made = hook_of(hook)
    with suppress(UsageError):
        _simulated([_recording(made, directory)], directory)
    _check_calls(made, directory)


def check_end_after_failure_in_the_simulator(hook: str, directory: Path) -> None:
    """When the run fails, `failed` and then `end` are called, but not of a hook whose begin failed."""
    _check_failure(hook, directory, _simulated)


def check_end_after_failure_in_processes(hook: str, directory: Path) -> None:
    """The same calls in the same order around real workers, up to `failed` and `end` when the run fails."""
    _check_failure(hook, directory, _trained)


CHECKS: tuple[Callable[[str, Path], None], ...] = (
    check_declaration,
    check_options,
    check_order_in_the_simulator,
    check_end_after_failure_in_the_simulator,
    check_end_after_failure_in_processes,
)


@dataclasses.dataclass
class Failing(Hook, name="failing"):
    """Raises an error in the chief's third step, or in its begin."""

    begins: bool = True

    def begin(self, session: Session) -> None:
        if session.worker.rank == 0 and not self.begins:
            raise SchemeError("this hook fails on purpose")

    def after_step(self, session: Session) -> None:
        if session.worker.rank == 0 and session.worker.t >= 3:
            raise SchemeError("this hook fails on purpose")


def _simulated(hooks: list[Hook], _: Path) -> None:
    simulate("toy", "sync", workers=2, steps=STEPS, lr=LR, hooks=hooks, say=lambda _: None)


def _trained(hooks: list[Hook], directory: Path) -> None:
    plan, scheme, objects = planned("toy", "sync", workers=2, steps=STEPS, hyper={"lr": LR}, hooks=hooks)
    place, threads = RunDirectory.create(directory, "run"), torch.get_num_threads()
    try:
        plan = dataclasses.replace(plan, directory=str(place.path))
        execute(plan, scheme, objects, tell=lambda *_: None, watch=lambda _: None)
    finally:
        torch.set_num_threads(threads)


def _check_failure(hook: str, directory: Path, run: Callable[[list[Hook], Path], None]) -> None:
    """In one run another hook fails in a step, in a second one in its begin."""
    made = hook_of(hook)
    for begins in (True, False):
        own, other = directory / f"own-{begins}", directory / f"other-{begins}"
        own.mkdir()
        other.mkdir()
        try:
            run([_recording(made, own), _recording(Failing(begins), other)], directory / f"run-{begins}")
        except PacelineError:
            pass
        else:
            raise AssertionError("the run did not fail, although a hook of it did")
        chief, failing = _check_calls(made, own).get(0, ""), _check_calls(Failing(), other).get(0, "")
        assert chief in ("", "B") or chief.endswith("FE"), f"the failure was not told: {chief}"
        assert begins or failing in ("", "B"), f"it was ended, although its begin failed: {failing}"


def _check_calls(hook: Hook, directory: Path) -> dict[int, str]:
    """The calls of each worker as letters; their order must be that of the contract."""
    calls = {int(path.name.removeprefix("calls-")): path.read_text() for path in directory.glob("calls-*")}
    for rank, letters in calls.items():
        assert LIFE.fullmatch(letters), f"worker:{rank}: {letters} (letters: {LETTERS})"
        assert ("worker" if rank else "chief") in hook.roles, f"it was called on worker:{rank}, which is no role of it"
    return calls


def _recording(hook: Hook, directory: Path) -> Hook:
    """A copy of the hook that writes a letter for each of its calls to a file of the worker."""
    kind = type(hook)

    def note(session: Session, method: str) -> None:
        with (directory / f"calls-{session.worker.rank}").open("a") as file:
            file.write(LETTERS[method])

    def feed(self: Hook, session: Session, batch: Batch) -> Batch:
        note(session, "feed")
        return kind.feed(self, session, batch)

    def noting(method: str) -> Callable[..., None]:
        def call(self: Hook, session: Session, *rest: Any) -> None:
            note(session, method)
            getattr(kind, method)(self, session, *rest)

        return call

    recorded = copy.copy(hook)
    methods = {**{method: noting(method) for method in LETTERS}, "feed": feed}
    recorded.__class__ = type(kind.__name__, (kind,), methods | {"__module__": kind.__module__})
    type(recorded).name = kind.name
    return recorded


def _refusal(hook: str) -> str:
    try:
        hook_of(hook)
    except UsageError as error:
        return str(error)
    return ""
