"""Tables for the terminal: the result of a run, and the parameters of a member."""

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any, get_type_hints

from rich.table import Table

from paceline.config.build import keys_of
from paceline.config.discovery import Member
from paceline.fields import described
from paceline.report.run_tables import facts
from paceline.result import Result
from paceline.scheme import fields


def closing(result: Result) -> Table:
    """The result of a run."""
    return facts(f"{result.scheme} on {result.task}", result.rows(), justify="right")


def parameters(family: str, found: Member) -> Table | None:
    """The parameters of a member: word, allowed values, default."""
    rows = list(parameter_rows(family, found.value))
    if not rows:
        return None
    table = Table("word", "allowed", "default", title="takes", title_justify="left")
    table.columns[0].style = "bold"
    for row in rows:
        table.add_row(*row)
    return table


def parameter_rows(family: str, value: Any) -> Iterator[tuple[str, str, str]]:
    """(word, allowed values, default) of each parameter of a member."""
    if family == "schemes":
        for word, (field, hint) in zip(keys_of(value), fields(value), strict=True):
            yield word, described(hint), shown(field.default)
    elif family == "tasks" and inspect.isfunction(value):
        hints = get_type_hints(value, include_extras=True)
        for name, parameter in inspect.signature(value).parameters.items():
            needed = parameter.default is parameter.empty
            yield f"task.{name}", described(hints.get(name, str)), "needed" if needed else shown(parameter.default)
    elif family == "launchers":
        for key, text in value.keys.items():
            allowed, _, default = text.partition("; default: ")
            yield f"--engine {key}=", allowed, default
    elif dataclasses.is_dataclass(value):
        hints = get_type_hints(value, include_extras=True)
        for field in dataclasses.fields(value):
            needed = field.default is dataclasses.MISSING
            yield field.name, described(hints[field.name]), "needed" if needed else shown(field.default)


def shown(default: Any) -> str:
    """A default as it is written on the command line."""
    if isinstance(default, bool):
        return str(default).lower()
    if default is None or default == ():
        return "none"
    if dataclasses.is_dataclass(default) and hasattr(default, "name"):
        return str(default.name)
    return f"{default:g}" if isinstance(default, float) else str(default)
