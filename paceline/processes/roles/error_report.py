"""An error of a role as a message to its launcher, and back."""

from __future__ import annotations

import traceback
from typing import Any

from paceline import errors
from paceline.errors import PacelineError, RunError, UsageError
from paceline.processes import resource_limits
from paceline.processes.roles.roles import Role


def report_of(role: Role, error: BaseException, step: int | None) -> dict[str, Any]:
    """What the launcher is told of an error; `step`: of the worker that raised it."""
    own = isinstance(error, PacelineError)
    notes = list(getattr(error, "__notes__", ()))
    if not own:
        last = traceback.extract_tb(error.__traceback__)[-1:]
        notes += [f"at {frame.filename}:{frame.lineno}: {frame.line}" for frame in last]
    notes.append(f"the full log is logs/{role.file}.log")
    return {
        "kind": type(error).__name__ if own else "RunError",
        "where": str(role) if step is None else f"{role}, step {step}",
        "text": text_of(error),
        "notes": notes,
    }


def text_of(error: BaseException) -> str:
    if isinstance(error, PacelineError):
        return str(error)
    return resource_limits.explained(error) or f"{type(error).__name__}: {error}"


def error_of(told: dict[str, Any]) -> PacelineError:
    """The error that a role has reported."""
    kind = getattr(errors, told["kind"], RunError)
    text = told["text"] if told["text"].startswith(told["where"]) else f"{told['where']}: {told['text']}"
    if kind is errors.UnknownName:  # it would write the text itself, and this one is written
        kind = UsageError
    error: PacelineError = kind(text) if issubclass(kind, PacelineError) else RunError(text)
    for note in told["notes"]:
        error.add_note(note)
    return error
