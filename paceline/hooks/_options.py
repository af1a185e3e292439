"""Hooks whose options are checked against their types and bounds, from the command line and from Python."""

import dataclasses
from typing import get_type_hints

from paceline.errors import UsageError
from paceline.fields import converted
from paceline.hook import Hook


class Checked(Hook):
    """Subclasses are dataclasses; a `__post_init__` of their own calls this one first."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        for option in dataclasses.fields(self):  # type: ignore[arg-type]
            given = getattr(self, option.name)
            if not callable(given):  # a function may be given instead of its name
                setattr(self, option.name, converted(self.name, option.name, given, hints[option.name]))

    def _only_one(self, *options: str, needed: bool = False) -> None:
        """Refuse more than one of these options, and none if one is `needed`."""
        given = {name: value for name in options if (value := getattr(self, name)) is not None}
        if len(given) > 1 or (needed and not given):
            plain = (f"{name}={value:g}" for name, value in given.items())  # numbers
            shown = ", ".join(plain) or "none of them"
            raise UsageError(f"{self.name}: give one of {', '.join(options)}, not {shown}")
