"""Finds the members of a family by name: first the files of its folder, then what other packages register.

Adding a file to `paceline/schemes/` (or an entry point of the group `paceline.schemes`) is all it takes.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from paceline import datasets, user_code
from paceline.compute_times import ComputeTime, laws
from paceline.errors import PacelineError, UnknownName, UsageError
from paceline.hook import Hook
from paceline.launcher import Launcher
from paceline.rules import Rule
from paceline.rules import rules as rules_by_name
from paceline.scheme import Scheme
from paceline.task import Task


@dataclass(frozen=True)
class Member:
    """A member of a family. A broken one has no value but an `error`, which is raised where it is asked for."""

    name: str
    value: Any
    error: PacelineError | None = None

    @property
    def summary(self) -> str:
        """The first line of its docstring, or why it cannot be read."""
        if self.error is None:
            return self.doc.partition("\n")[0]
        return "; ".join((str(self.error), *getattr(self.error, "__notes__", ())))

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.value) or ""

    @property
    def file(self) -> str:
        """The file that defines it, from the package's root where it lies in the package."""
        value = self.value
        if not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)):
            value = type(value)
        try:
            path = Path(inspect.getsourcefile(value) or "?").resolve()
        except TypeError:  # made in C
            return "?"
        root = Path(__file__).resolve().parents[2]
        return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def schemes() -> dict[str, Member]:
    """Every scheme that can be read: public classes of the files in paceline/schemes/."""
    return _sound(_members("schemes"))


def tasks() -> dict[str, Member]:
    """Every task that can be read: functions that return one, in the files of paceline/tasks/."""
    return _sound(_members("tasks"))


def rules() -> dict[str, Member]:
    """Every update rule."""
    return {name: Member(name, rule) for name, rule in sorted(rules_by_name().items())}


def compute() -> dict[str, Member]:
    """Every law of compute times."""
    return {name: Member(name, law) for name, law in sorted(laws().items())}


def data() -> dict[str, Member]:
    """Every data set."""
    return {name: Member(name, datasets.module(name)) for name in datasets.names()}


def hooks() -> dict[str, Member]:
    """Every hook that can be read: public classes of the files in paceline/hooks/."""
    return _sound(_members("hooks"))


# all that there is, broken members too
FAMILIES: dict[str, Callable[[], dict[str, Member]]] = {
    "schemes": lambda: _members("schemes"),
    "tasks": lambda: _members("tasks"),
    "rules": rules,
    "hooks": lambda: _members("hooks"),
    "launchers": lambda: _members("launchers"),
    "compute": compute,
    "data": data,
}


_ANY = "scheme, task, rule or hook"


def scheme(name: str) -> type[Scheme]:
    """A scheme by its name, or by `file.py:Class` or `package.module:Class`."""
    if ":" in name:
        value = _reference("scheme", name)
        if _family(value) != "schemes":
            raise UsageError(f"{name!r} is not a scheme: it must name a subclass of paceline.Scheme")
        return value  # type: ignore[no-any-return]
    return _named("scheme", name)  # type: ignore[no-any-return]


def task(name: str) -> Any:
    """A task by its name, or by `file.py:name` or `package.module:name`: a Task, or a function that makes one."""
    return _reference("task", name) if ":" in name else _named("task", name)


def hook(name: str) -> Any:
    """A hook by its name, or by `file.py:Class` or `package.module:Class`."""
    return _reference("hook", name) if ":" in name else _named("hook", name)


def launcher(name: str) -> Launcher:
    """A launcher by its name, or by `file.py:Class` or `package.module:Class`."""
    found = _reference("launcher", name) if ":" in name else _alone_or_named("launcher", name)
    if _family(found) != "launchers":
        raise UsageError(f"{name!r} is not a launcher: it must name a subclass of paceline.launcher.Launcher")
    made: Launcher = user_code.attempt(f"making the launcher {name}", found)
    return made


def launchers() -> dict[str, Member]:
    """Every launcher that can be read: public classes of the files in paceline/launchers/."""
    return _sound(_members("launchers"))


def transport(name: str) -> Any:
    """A transport by its name: an object that has the members of `processes.transport.Transport`."""
    return _alone_or_named("transport", name)()


def collective(name: str) -> Any:
    """A collective by its name: an object that has the members of `processes.transport.Collective`."""
    return _alone_or_named("collective", name)()


def transports() -> list[str]:
    """The names of all transports."""
    return list(_sound(_members("transports")))


def collectives() -> list[str]:
    """The names of all collectives."""
    return list(_sound(_members("collectives")))


def anything(name: str) -> tuple[str, Member]:
    """A member of whichever family has that name, and the family."""
    if ":" in name:
        value = _reference(_ANY, name)
        kind = _family(value)
        if kind is None:
            raise UsageError(
                f"{name!r} is a {type(value).__name__}; there is something to show of a scheme, rule, hook or compute "
                "law (a class) and of a task (a paceline.Task, or a function that makes one)"
            )
        return kind, Member(name, value)
    every = [(family, found) for family, get in FAMILIES.items() for found in get().values()]
    for family, found in every:
        if found.name == name:
            return family, _checked(found)
    what = "scheme, task, rule, hook, launcher, compute law or data set"
    raise _unknown(what, name, (found for _, found in every))


def _alone_or_named(kind: str, name: str) -> Any:
    """A member of the file of its name. Every role asks for these, and reading the whole family would cost it time."""
    home = f"paceline.{kind}s.{name.replace('-', '_')}"
    if find_spec(home) is not None:
        found = _of_file(f"{kind}s", home)
        if name in found:
            return found[name].value
    return _named(kind, name)


def _named(kind: str, name: str) -> Any:
    known = _members(f"{kind}s")
    if name not in known:
        raise _unknown(kind, name, known.values())
    return _checked(known[name]).value


def _checked(found: Member) -> Member:
    if found.error is not None:
        raise found.error
    return found


def _unknown(kind: str, name: str, known: Iterable[Member]) -> UnknownName:
    """What is not there; it may well be what a broken file would have held."""
    known = list(known)
    error = UnknownName(kind, name, {found.name for found in known})
    for found in known:
        if found.error is not None:
            error.add_note(found.summary)
    return error


def _sound(members: dict[str, Member]) -> dict[str, Member]:
    return {name: found for name, found in members.items() if found.error is None}


def _members(family: str) -> dict[str, Member]:
    """A family's folder and entry points. What cannot be read is a member by its file's name, and breaks no other."""
    package = importlib.import_module(f"paceline.{family}")
    found: dict[str, Member] = {}
    broken: dict[str, Member] = {}
    for info in pkgutil.iter_modules(package.__path__):
        if not info.name.startswith("_"):
            try:
                place = f"paceline/{family}/{info.name}.py"
                found |= user_code.attempt(place, _of_file, family, f"{package.__name__}.{info.name}")
            except PacelineError as error:
                name = info.name.rstrip("_").replace("_", "-")
                broken[name] = Member(name, None, error)
    for entry in entry_points(group=f"paceline.{family}"):
        if entry.name not in found:
            try:
                value = user_code.attempt(
                    f"the entry point {entry.name} = {entry.value} of paceline.{family}", entry.load
                )
                if _family(value) != family:
                    raise UsageError(f"the entry point {entry.name} = {entry.value} is not one of paceline.{family}")
                found[entry.name] = Member(entry.name, value)
            except PacelineError as error:
                broken[entry.name] = Member(entry.name, None, error)
    return dict(sorted((broken | found).items()))


def _of_file(family: str, name: str) -> dict[str, Member]:
    kinds = {
        **{"schemes": _classes(Scheme), "hooks": _classes(Hook), "launchers": _classes(Launcher)},
        "tasks": _tasks_of,
    }
    members = kinds.get(family) or _classes_like(family)
    return {name: Member(name, value) for name, value in members(importlib.import_module(name))}


def _family(value: Any) -> str | None:
    """The family of a thing, told by what it is."""
    if not inspect.isclass(value):
        return "tasks" if isinstance(value, Task) or callable(value) else None
    families = {
        **{"schemes": Scheme, "hooks": Hook, "launchers": Launcher},
        **{"rules": Rule, "compute": ComputeTime, "tasks": Task},
    }
    alike = {"transports": ("name", "calls", "port", "order"), "collectives": ("name", "means", "store")}
    found = next((family for family, of in families.items() if issubclass(value, of)), None)
    return found or next((family for family, has in alike.items() if all(hasattr(value, one) for one in has)), None)


def _classes(of: type[Scheme] | type[Hook] | type[Launcher]) -> Callable[[ModuleType], Iterator[tuple[str, Any]]]:
    def members(module: ModuleType) -> Iterator[tuple[str, Any]]:
        for name, value in vars(module).items():
            own = inspect.isclass(value) and value.__module__ == module.__name__
            if own and issubclass(value, of) and not name.startswith("_"):
                yield value.name, value

    return members


def _classes_like(family: str) -> Callable[[ModuleType], Iterator[tuple[str, Any]]]:
    def members(module: ModuleType) -> Iterator[tuple[str, Any]]:
        for name, value in vars(module).items():
            own = inspect.isclass(value) and value.__module__ == module.__name__
            if own and _family(value) == family and not name.startswith("_"):
                yield value.name, value

    return members


def _tasks_of(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
            gives = get_type_hints(value).get("return")
            if inspect.isclass(gives) and issubclass(gives, Task):
                yield name.replace("_", "-"), value


def _reference(kind: str, text: str) -> Any:
    where, _, attribute = text.rpartition(":")
    module = user_code.file(kind, Path(where)) if where.endswith(".py") else user_code.module(kind, where)
    if not hasattr(module, attribute):
        raise UnknownName(f"{kind} in {where}", attribute, _meant(kind, module))
    return getattr(module, attribute)


def _meant(kind: str, module: ModuleType) -> Iterator[str]:
    """The names in a module that such a reference could be meant for."""
    for name, value in vars(module).items():
        family = None if name.startswith("_") else _family(value)
        if family is None or kind not in (_ANY, family.removesuffix("s")):
            continue
        if isinstance(value, Task):
            yield name
            continue
        # of what it imported only members: neither Scheme itself nor some function
        home = getattr(value, "__module__", None) or ""
        own = home == module.__name__ or f"{home}.".startswith(f"paceline.{family}.")
        if own and (family != "tasks" or inspect.isclass(value) or _may_make_a_task(value)):
            yield name


def _may_make_a_task(function: Any) -> bool:
    try:
        gives = get_type_hints(function).get("return")
    except (NameError, TypeError):
        return False
    return gives is None or (inspect.isclass(gives) and issubclass(gives, Task))
