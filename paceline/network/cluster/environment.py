"""What an engine sets in the environment of its processes: how it is found, and how its variables are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.network.cluster.description import Cluster

LIMIT = 65_536  # tasks of a cluster


@dataclass(frozen=True)
class EnvironmentSource:
    """An engine that numbers the processes that it starts."""

    name: str
    rank: str  # the variable with the number of this process
    order: int  # where several engines are present, the smallest counts: that of the innermost one
    present: Callable[[Mapping[str, str]], bool]
    seen: Callable[[Mapping[str, str]], Cluster | None]
    job: Callable[[Mapping[str, str]], str | None] = lambda environment: None  # a name, equal in all tasks of a job
    ends_all: bool = False  # it kills every process when one ends with another exit code than 0


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
