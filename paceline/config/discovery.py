"""Finds the members of a family by name: first the files of its folder, then what other packages register.

Adding a file to `paceline/schemes/` (or an entry point of the group `paceline.schemes`) is all it takes.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from paceline import datasets, user_code
from paceline.compressor import Compressor
from paceline.compute_times import ComputeTime, laws
from paceline.config import registered
from paceline.errors import PacelineError, UnknownName, UsageError
from paceline.hook import Hook
from paceline.launcher import Launcher
from paceline.rules import Rule, rules
from paceline.scheme import Scheme
from paceline.task import Task


@dataclass(frozen=True)
class Member:
    """A member of a family. A broken one has an `error` instead of a value, which is raised when the member is used."""

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
        """The file that defines it; a file of this package without the folders above the package."""
        value = self.value
        if not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)):
            value = type(value)
        try:
            path = Path(inspect.getsourcefile(value) or "?").resolve()
        except TypeError:  # made in C
            return "?"
        root = Path(__file__).resolve().parents[2]
        return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


# the base class of a family; transports and collectives are recognised by their attributes
BASES = {
    "schemes": Scheme,
    "hooks": Hook,
    "launchers": Launcher,
    "rules": Rule,
    "compressors": Compressor,
    "compute": ComputeTime,
    "tasks": Task,
}
ATTRIBUTES = {"transports": ("name", "calls", "port", "order"), "collectives": ("name", "means", "store")}

# the families of `paceline list`, with their broken members
FAMILIES: dict[str, Callable[[], dict[str, Member]]] = {
    "schemes": lambda: _members("schemes"),
    "tasks": lambda: _members("tasks"),
    "rules": lambda: {name: Member(name, rule) for name, rule in sorted(rules().items())},
    "compressors": lambda: _members("compressors"),
    "hooks": lambda: _members("hooks"),
    "launchers": lambda: _members("launchers"),
    "compute": lambda: {name: Member(name, law) for name, law in sorted(laws().items())},
    "data": lambda: {name: Member(name, datasets.module(name)) for name in datasets.names()},
}
_ANY = "scheme, task, rule or hook"


def readable(family: str) -> dict[str, Member]:
    """The members of a family that are not broken."""
    return {name: found for name, found in _members(family).items() if found.error is None}


def schemes() -> dict[str, Member]:
    return readable("schemes")


def tasks() -> dict[str, Member]:
    return readable("tasks")


def hooks() -> dict[str, Member]:
    return readable("hooks")


def scheme(name: str) -> type[Scheme]:
    """A scheme by its name, or by `file.py:Class` or `package.module:Class`."""
    value = _found("scheme", name)
    if _family(value) != "schemes":
        raise UsageError(f"{name!r} is not a scheme: it must name a subclass of paceline.Scheme")
    return value  # type: ignore[no-any-return]


def task(name: str) -> Any:
    """A task by its name, or by `file.py:name` or `package.module:name`: a Task, or a function that makes one."""
    return _found("task", name)


def hook(name: str) -> Any:
    """A hook by its name, or by `file.py:Class` or `package.module:Class`."""
    return _found("hook", name)


def compressors() -> dict[str, Member]:
    return readable("compressors")


def compressor(name: str) -> type[Compressor]:
    """A compressor by its name, or by `file.py:Class` or `package.module:Class`."""
    value = _found("compressor", name)
    if _family(value) != "compressors":
        raise UsageError(f"{name!r} is not a compressor: it must name a subclass of paceline.Compressor")
    return value  # type: ignore[no-any-return]


def launcher(name: str) -> Launcher:
    """A launcher by its name, or by `file.py:Class` or `package.module:Class`."""
    found = _found("launcher", name)
    if _family(found) != "launchers":
        raise UsageError(f"{name!r} is not a launcher: it must name a subclass of paceline.launcher.Launcher")
    made: Launcher = user_code.attempt(f"making the launcher {name}", found)
    return made


def transport(name: str) -> Any:
    """A transport by its name: an object that has the members of `processes.transport.Transport`."""
    return _found("transport", name)()


def collective(name: str) -> Any:
    """A collective by its name: an object that has the members of `processes.transport.Collective`."""
    return _found("collective", name)()


def anything(name: str) -> tuple[str, Member]:
    """The member of that name, and its family."""
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
    what = "scheme, task, rule, compressor, hook, launcher, compute law or data set"
    raise _unknown(what, name, [found for _, found in every])


def _found(kind: str, name: str) -> Any:
    """A member by reference or name. The file of its name is read first: reading the whole family takes time."""
    if ":" in name:
        return _reference(kind, name)
    family, stem = f"{kind}s", name.replace("-", "_")
    for file in {stem, f"{stem}_"}.intersection(_stems(family)):  # async_.py: a word of Python cannot name a module
        alone = _of_file(family, file)
        if name in alone:
            return alone[name].value
    known, _ = _of_folder(family)  # to ask all installed packages takes time too
    if name not in known:
        known = _members(family)
    if name not in known and name.endswith(".py") and Path(name).is_file():
        inside = sorted(_meant(kind, user_code.named(kind, name)), key=lambda one: one != kind)
        hint = f"did you mean {f'{name}:{inside[0]}'!r}?" if inside else f"it defines no {kind}; write file.py:NAME"
        raise UsageError(f"{name!r} is a file, not a {kind}; {hint}")
    if name not in known:
        raise _unknown(kind, name, known.values())
    return _checked(known[name]).value


def _checked(found: Member) -> Member:
    if found.error is not None:
        raise found.error
    return found


def _unknown(kind: str, name: str, known: Iterable[Member]) -> UnknownName:
    """The error of a name that does not exist. Its notes name the broken files, which may define it."""
    error = UnknownName(kind, name, {found.name for found in known})
    for found in known:
        if found.error is not None:
            error.add_note(found.summary)
    return error


def _members(family: str) -> dict[str, Member]:
    """The members in a family's folder and entry points. A broken file is a member by the file's name."""
    found, broken = _of_folder(family)
    for entry in registered.entries(f"paceline.{family}"):
        if entry.name not in found:
            what = f"the entry point {entry.name} = {entry.value}"
            try:
                value = user_code.attempt(f"{what} of paceline.{family}", entry.load)
                if _family(value) != family:
                    raise UsageError(f"{what} is not one of paceline.{family}")
                found[entry.name] = Member(entry.name, value)
            except PacelineError as error:
                broken[entry.name] = Member(entry.name, None, error)
    return dict(sorted((broken | found).items()))


def _of_folder(family: str) -> tuple[dict[str, Member], dict[str, Member]]:
    """The members in a family's folder, and its broken files, each by its name."""
    found: dict[str, Member] = {}
    broken: dict[str, Member] = {}
    for stem in _stems(family):
        try:
            found |= _of_file(family, stem)
        except PacelineError as error:
            name = stem.rstrip("_").replace("_", "-")
            broken[name] = Member(name, None, error)
    return found, broken


def _stems(family: str) -> list[str]:
    """The modules of a family's folder."""
    package = importlib.import_module(f"paceline.{family}")
    return [name for name in registered.modules(package.__path__) if not name.startswith("_")]


def _of_file(family: str, stem: str) -> dict[str, Member]:
    """The members that a file of a family's folder defines."""

    def read() -> dict[str, Member]:
        module = importlib.import_module(f"paceline.{family}.{stem}")
        found: dict[str, Any] = {}
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
                continue
            if family == "tasks" and inspect.isfunction(value) and _makes_a_task(value):
                found[name.replace("_", "-")] = value
            elif family != "tasks" and _family(value) == family:  # a class
                found[value.name] = value
        return {name: Member(name, value) for name, value in found.items()}

    return user_code.attempt(f"paceline/{family}/{stem}.py", read)


def _makes_a_task(function: Any) -> bool:
    gives = get_type_hints(function).get("return")
    return inspect.isclass(gives) and issubclass(gives, Task)


def _family(value: Any) -> str | None:
    """The family that a value belongs to by its kind."""
    if not inspect.isclass(value):
        return "tasks" if isinstance(value, Task) or callable(value) else None
    found = [family for family, of in BASES.items() if issubclass(value, of)]
    found += [family for family, names in ATTRIBUTES.items() if all(hasattr(value, name) for name in names)]
    return found[0] if found else None


def _reference(kind: str, text: str) -> Any:
    where, _, attribute = text.rpartition(":")
    module = user_code.named(kind, where)
    if not hasattr(module, attribute):
        raise UnknownName(f"{kind} in {where}", attribute, _meant(kind, module))
    return getattr(module, attribute)


def _meant(kind: str, module: ModuleType) -> Iterator[str]:
    """The names in a module that such a reference could be meant for."""
    for name, value in vars(module).items():
        family = None if name.startswith("_") else _family(value)
        if family is None or kind not in (_ANY, family.removesuffix("s")):
            continue
        # of what it imported only members: neither Scheme itself nor some function
        home = getattr(value, "__module__", None) or ""
        own = home == module.__name__ or f"{home}.".startswith(f"paceline.{family}.")
        if isinstance(value, Task) or (own and (inspect.isclass(value) or _may_make_a_task(value))):
            yield name


def _may_make_a_task(function: Any) -> bool:
    try:
        return "return" not in get_type_hints(function) or _makes_a_task(function)
    except (NameError, TypeError):
        return False
