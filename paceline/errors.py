"""Every error that paceline raises on purpose, drawn as a tree.

PacelineError
├── UsageError          the caller asked for something that does not exist or is not allowed     exit 2
│   └── UnknownName     a misspelt scheme, task, hyper-parameter, …; suggests the nearest
├── DataError           a data set is missing, damaged, or could not be downloaded              exit 3
└── RunError            a run that began could not continue                                     exit 1
    ├── SchemeError     a scheme broke the contract of schemes
    ├── LossError       the loss is not a finite number
    └── Deadlock        every worker waits for something that cannot happen
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.result import Result


class PacelineError(Exception):
    """The root: `except PacelineError` catches all that paceline raises on purpose."""

    exit_code = 1


class UsageError(PacelineError):
    """The request itself is wrong; nothing was started."""

    exit_code = 2


class UnknownName(UsageError):
    """An unknown name. The message suggests a similar one, or lists all that are allowed. `meant`: another word for the
    same thing, which is suggested if it is allowed."""

    def __init__(self, kind: str, name: str, allowed: Iterable[str], meant: str | None = None) -> None:
        known = sorted(allowed)
        begin = [meant] if meant in known else [one for one in known if name and one.startswith(name)]
        near = begin or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known) or 'none'}"
        super().__init__(f"no {kind} {name!r}; {hint}")


class DataError(PacelineError):
    """A data set is missing, or its content differs from the published one."""

    exit_code = 3


class RunError(PacelineError):
    """A run began and could not continue. `result`: what it had reached."""

    result: Result | None = None


class SchemeError(RunError):
    """A scheme broke the contract of schemes."""


class LossError(RunError):
    """The loss became NaN or infinite."""


class Deadlock(RunError):
    """Every living worker waits for something that can no longer happen."""
