"""Hooks whose options are checked against their types and bounds, from the command line and from Python."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

from paceline.errors import UsageError
from paceline.fields import bounds, converted
from paceline.hook import Hook


class Checked(Hook):
    """Subclasses are dataclasses; a `__post_init__` of their own calls this one first."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        for option in dataclasses.fields(self):  # type: ignore[arg-type]
            given = getattr(self, option.name)
            if callable(given):  # a function instead of its name
                continue
            value = converted(self.name, option.name, given, hints[option.name])
            setattr(self, option.name, value)
            if value is not None:
                for bound in bounds(hints[option.name]):
                    bound.check(self.name, option.name, value)

    def _only_one(self, *options: str, needed: bool = False) -> None:
        """Refuse more than one of these options, and none if one is `needed`."""
        given = {name: value for name in options if (value := getattr(self, name)) is not None}
        if len(given) > 1 or (needed and not given):
            shown = ", ".join(f"{name}={_plain(value)}" for name, value in given.items()) or "none of them"
            raise UsageError(f"{self.name}: give one of {', '.join(options)}, not {shown}")


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
