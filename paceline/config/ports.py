"""Ports that a process may listen on, where they are fixed for a firewall: `--ports 20000-20040`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from paceline.errors import UsageError

OPTION, VARIABLE = "--ports", "PACELINE_PORTS"
_HIGHEST = 65535


@dataclass(frozen=True)
class Ports:
    """A range of ports. Each listener takes the first one that is free. `firm`: no other port may be taken."""

    first: int
    last: int
    firm: bool = True

    @classmethod
    def parse(cls, text: str, where: str = OPTION) -> Ports:
        """`20000-20040`, or one port; `where` is what an error calls it."""
        match = re.fullmatch(r"\s*([0-9]{1,5})(?:-([0-9]{1,5}))?\s*", text)
        if match is None:
            raise UsageError(f"{where} {text}: write the first and the last port, such as 20000-20040")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise UsageError(f"{where} {text}: the lower port comes first: {last}-{first}")
        if first < 1 or last > _HIGHEST:
            raise UsageError(f"{where} {text}: ports are numbers from 1 to {_HIGHEST}")
        return cls(first, last)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last + 1))

    def __contains__(self, port: object) -> bool:
        return isinstance(port, int) and self.first <= port <= self.last

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


def of_environment(environment: Mapping[str, str]) -> Ports | None:
    """The range that the variable names; None: the system chooses ports."""
    text = environment.get(VARIABLE, "")
    return Ports.parse(text, VARIABLE) if text.strip() else None
