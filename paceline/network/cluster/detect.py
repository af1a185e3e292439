"""The cluster that the environment describes, by the variables that an engine sets for the processes that it starts.

Where the variables of several engines are set, those of the innermost engine count, with a note for the user.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from paceline.errors import UsageError
from paceline.network.cluster import sources, tf_config
from paceline.network.cluster.description import Cluster

LIMIT = 65_536  # tasks of a cluster


@dataclass(frozen=True)
class EnvironmentSource:
    """An engine that numbers the processes that it starts."""

    name: str
    rank: str  # the variable with the number of this process
    order: int  # where several engines are present, the smallest counts: that of the innermost one
    present: Callable[[Mapping[str, str]], bool]
    read: Callable[[Variables], Cluster]
    job: Callable[[Mapping[str, str]], str | None] = lambda environment: None  # a name, equal in all tasks of a job
    ends_all: bool = False  # it kills every process when one ends with another exit code than 0

    def seen(self, environment: Mapping[str, str]) -> Cluster | None:
        """The cluster of this process; None: the engine has not started it."""
        return self.read(Variables(self.name, environment)) if self.present(environment) else None


@dataclass(frozen=True)
class Variables:
    """An environment as one source reads it. An empty variable counts as missing."""

    source: str
    environment: Mapping[str, str]

    def name(self, *names: str) -> str | None:
        """The first of these variables that is set."""
        return next((name for name in names if self.environment.get(name, "").strip()), None)

    def text(self, *names: str) -> str | None:
        """The value of the first of these variables that is set."""
        name = self.name(*names)
        return None if name is None else self.environment[name].strip()

    def need(self, *names: str) -> None:
        """Every one of these must be set; `A|B` is satisfied by either."""
        missing = [name.replace("|", " or ") for name in names if self.text(*name.split("|")) is None]
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            raise UsageError(f"{self.source}: {', '.join(missing)} {verb} missing in the environment")

    def number(self, *names: str, least: int = 0, below: tuple[str, int] | None = None) -> int | None:
        """A whole number; with `below`, smaller than that of another variable."""
        name = self.name(*names)
        if name is None:
            return None
        text = self.text(name) or ""
        if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
            raise UsageError(f"{self.source}: {name} must be a whole number of at least {least}, not {text!r}")
        if below is not None and int(text) >= below[1]:
            raise UsageError(f"{self.source}: {name} is {text}, but {below[0]} is {below[1]}")
        return int(text)

    def size(self, *names: str) -> int:
        """A number of tasks; a damaged variable must not fill the memory."""
        found = self.needed(*names, least=1)
        if found > LIMIT:
            raise UsageError(f"{self.source}: {self.name(*names)} is {found:,}; at most {LIMIT:,} tasks are allowed")
        return found

    def needed(self, *names: str, least: int = 0, below: tuple[str, int] | None = None) -> int:
        self.need("|".join(names))
        found = self.number(*names, least=least, below=below)
        assert found is not None
        return found


def any_set(*names: str) -> Callable[[Mapping[str, str]], bool]:
    """Whether one of these variables is set."""
    return lambda environment: any(environment.get(name) for name in names)


@cache
def engines() -> tuple[EnvironmentSource, ...]:
    """The sources of all files in sources/, the innermost first."""
    names = [f"{sources.__name__}.{one.name}" for one in pkgutil.iter_modules(sources.__path__)]
    modules = [importlib.import_module(name) for name in names]
    found = {one for module in modules for one in vars(module).values() if isinstance(one, EnvironmentSource)}
    return tuple(sorted(found, key=lambda one: one.order))


def present(environment: Mapping[str, str]) -> list[EnvironmentSource]:
    """The engines that have set variables of this environment."""
    return [engine for engine in engines() if engine.present(environment)]


def seen(environment: Mapping[str, str]) -> Cluster | None:
    """The cluster that an environment describes; None: this process is alone. TF_CONFIG takes precedence: it names the
    role of each task."""
    found = present(environment)
    named = tf_config.seen(environment)
    if named is not None:
        ignored = ", ".join(engine.name for engine in found)
        return noted(named, f"TF_CONFIG counts; the variables of {ignored} are not read") if found else named
    cluster = found[0].seen(environment) if found else None
    if cluster is None:
        return None
    first, *others = found
    for other in others:
        ours, theirs = environment.get(first.rank), environment.get(other.rank)
        if ours != theirs:
            told = f"{other.rank} is {theirs}" if theirs else f"{other.name} is there too"
            cluster = noted(cluster, f"{first.rank} counts, which is {ours}; {told} and is not read")
    return cluster


def noted(cluster: Cluster, note: str) -> Cluster:
    """The cluster with one more note for the user."""
    return replace(cluster, notes=(*cluster.notes, note))
