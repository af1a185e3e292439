"""Finds the members of a family by name: first the files of its folder, then what other packages register.

Adding a file to `paceline/schemes/` (or an entry point of the group `paceline.schemes`) is all it takes.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from paceline.errors import UnknownName, UsageError
from paceline.hook import Hook
from paceline.scheme import Scheme
from paceline.task import Task


@dataclass(frozen=True)
class Found:
    """A member of a family."""

    name: str
    value: Any

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return self.doc.partition("\n")[0]

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.value) or ""

    @property
    def file(self) -> str:
        """The file that defines it, from the package's root where it lies in the package."""
        path = Path(inspect.getsourcefile(self.value) or "?").resolve()
        root = Path(__file__).resolve().parent.parent
        return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def schemes() -> dict[str, Found]:
    """Every scheme: public classes of the files in paceline/schemes/."""
    return _members("schemes", _classes(Scheme))


def tasks() -> dict[str, Found]:
    """Every task: functions that return one, in the files of paceline/tasks/."""
    return _members("tasks", _tasks_of)


def rules() -> dict[str, Found]:
    """Every update rule."""
    from paceline.rules import rules as known

    return {name: Found(name, rule) for name, rule in sorted(known().items())}


def compute() -> dict[str, Found]:
    """Every law of compute times."""
    from paceline.sim.cost import laws

    return {name: Found(name, law) for name, law in sorted(laws().items())}


def data() -> dict[str, Found]:
    """Every data set."""
    from paceline import data as sets

    return {
        name: Found(name, importlib.import_module(f"paceline.data.{name.replace('-', '_')}")) for name in sets.names()
    }


def hooks() -> dict[str, Found]:
    """Every hook: public classes of the files in paceline/hooks/."""
    return _members("hooks", _classes(Hook))


FAMILIES: dict[str, Callable[[], dict[str, Found]]] = {
    "schemes": schemes,
    "tasks": tasks,
    "rules": rules,
    "hooks": hooks,
    "compute": compute,
    "data": data,
}


def scheme(name: str) -> type[Scheme]:
    """A scheme by its name, or by `file.py:Class` or `package.module:Class`."""
    if ":" in name:
        value = _reference("scheme", name)
        if not (inspect.isclass(value) and issubclass(value, Scheme)):
            raise UsageError(f"{name!r} is not a scheme: it must name a subclass of paceline.Scheme")
        return value
    return _named("scheme", name, schemes())  # type: ignore[no-any-return]


def task(name: str) -> Any:
    """A task by its name, or by `file.py:name` or `package.module:name`: a Task, or a function that makes one."""
    return _reference("task", name) if ":" in name else _named("task", name, tasks())


def hook(name: str) -> Any:
    """A hook by its name, or by `file.py:Class` or `package.module:Class`."""
    return _reference("hook", name) if ":" in name else _named("hook", name, hooks())


def anything(name: str) -> tuple[str, Found]:
    """A member of whichever family has that name, and the family."""
    every = {(family, member): found for family, get in FAMILIES.items() for member, found in get().items()}
    for (family, member), found in every.items():
        if member == name:
            return family, found
    if ":" in name:
        value = _reference("scheme or task", name)
        return ("schemes" if inspect.isclass(value) else "tasks"), Found(name, value)
    raise UnknownName("scheme, task, rule, hook, compute law or data set", name, {member for _, member in every})


def _named(kind: str, name: str, known: dict[str, Found]) -> Any:
    if name not in known:
        raise UnknownName(kind, name, known)
    return known[name].value


def _members(family: str, of: Callable[[ModuleType], Iterator[tuple[str, Any]]]) -> dict[str, Found]:
    package = importlib.import_module(f"paceline.{family}")
    found: dict[str, Found] = {}
    for info in pkgutil.iter_modules(package.__path__):
        if not info.name.startswith("_"):
            try:
                module = importlib.import_module(f"{package.__name__}.{info.name}")
            except Exception as error:
                error.add_note(f"while reading paceline/{family}/{info.name}.py")
                raise
            found |= {name: Found(name, value) for name, value in of(module)}
    for entry in entry_points(group=f"paceline.{family}"):
        if entry.name not in found:
            try:
                found[entry.name] = Found(entry.name, entry.load())
            except Exception as error:
                error.add_note(f"while loading the entry point {entry.name} = {entry.value} of paceline.{family}")
                raise
    return dict(sorted(found.items()))


def _classes(of: type[Scheme] | type[Hook]) -> Callable[[ModuleType], Iterator[tuple[str, Any]]]:
    def members(module: ModuleType) -> Iterator[tuple[str, Any]]:
        for name, value in vars(module).items():
            own = inspect.isclass(value) and value.__module__ == module.__name__
            if own and issubclass(value, of) and not name.startswith("_"):
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
    module = _file(kind, Path(where)) if where.endswith(".py") else _module(kind, where)
    if not hasattr(module, attribute):
        raise UnknownName(f"{kind} in {where}", attribute, [n for n in vars(module) if not n.startswith("_")])
    return getattr(module, attribute)


def _file(kind: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"no file {str(path)!r} for the {kind} (looked in {Path.cwd()})")
    # one module per file, however often it is named
    name = f"paceline_user_{blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _module(kind: str, name: str) -> ModuleType:
    if not name or name.startswith("."):
        raise UsageError(f"no module {name!r} for the {kind}; write package.module:NAME or file.py:NAME")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(f"no module {name!r} for the {kind}; a file is named with its .py ending") from None
        raise
