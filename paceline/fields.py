"""Types and bounds of options, and the conversion of values: texts of the command line, arguments from Python."""

import dataclasses
import inspect
import math
import numbers
import types
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from paceline.errors import UnknownName, UsageError
from paceline.schedules import KINDS, Schedule, is_schedule

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclasses.dataclass(frozen=True)
class Bound:
    """The values that a hyper-parameter may have."""

    low: float
    high: float = math.inf
    finite: bool = False
    above: bool = False  # `low` itself is not allowed

    def check(self, owner: str, name: str, value: object) -> None:
        values = value if isinstance(value, tuple) else (value,)
        for one in values:
            if isinstance(one, int | float) and not self._allows(one):
                raise UsageError(f"{owner}: {name} must be {self}, not {one:g}")
            if self.finite and isinstance(one, float) and math.isinf(one):
                raise UsageError(f"{owner}: {name} must be a finite number, not {one:g}")

    def _allows(self, value: float) -> bool:
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if self.above:
            return f"above {self.low:g}" + ("" if self.high == math.inf else f" and at most {self.high:g}")
        return f"at least {self.low:g}" if self.high == math.inf else f"from {self.low:g} to {self.high:g}"


def bounds(hint: Any) -> Iterator[Bound]:
    """The bounds anywhere in a type: `Count | None` and `tuple[Rate, ...]` have one each."""
    for part in get_args(hint):
        if isinstance(part, Bound):
            yield part
        else:
            yield from bounds(part)


FOLLOWS = "may follow a schedule"
Rate = Annotated[float, Bound(0, finite=True), FOLLOWS]
Count = Annotated[int, Bound(1)]
Natural = Annotated[int, Bound(0)]
Steps = Annotated[int, Bound(1), FOLLOWS]  # local steps; of a schedule the whole part counts, at least 1
Fraction = Annotated[float, Bound(0, 1)]
Feed = Literal["shared", "shard", "slice"]  # how workers share the samples


@dataclasses.dataclass(frozen=True)
class Component(ABC):
    """A value with a name and options of its own, such as an update rule: `rule=adam rule.beta1=0.8`.
    A component is a frozen dataclass."""

    kind: ClassVar[str] = "component"  # what errors and tables call it
    name: ClassVar[str] = ""

    @classmethod
    @abstractmethod
    def members(cls) -> Mapping[str, type[Self]]:
        """Every component of this kind, by name."""

    @classmethod
    def from_name(cls, name: str) -> Self:
        """The component with this name and default options."""
        known = cls.members()
        if name not in known:
            raise UnknownName(cls.kind, name, known)
        return known[name]()

    def given(self) -> dict[str, Any]:
        """The options that are not their defaults."""
        pairs = ((option.name, getattr(self, option.name), option.default) for option in dataclasses.fields(self))
        return {name: value for name, value, default in pairs if value != default}

    def with_options(self, given: Mapping[str, Any]) -> Self:
        """This component with other options."""
        hints = get_type_hints(type(self), include_extras=True)
        known = [option.name for option in dataclasses.fields(self)]
        owner, values = f"{self.kind} {self.name}", {}
        for key, value in given.items():
            if key not in known:
                raise UnknownName(f"option of {owner}", key, known)
            values[key] = converted(owner, key, value, hints.get(key, Any))
        return dataclasses.replace(self, **values)

    def scheduled(self) -> tuple[str, ...]:
        """The options that follow a schedule."""
        return tuple(name for name, value in vars(self).items() if isinstance(value, Schedule))

    def at(self, v: int) -> Self:
        """The component with the values that its options have at a version."""
        return dataclasses.replace(self, **{name: getattr(self, name).at(v) for name in self.scheduled()})


def is_component(hint: Any) -> bool:
    """Whether a field's type is a kind of component."""
    return inspect.isclass(hint) and issubclass(hint, Component)


def described(hint: Any) -> str:
    """A type in words, with its bound."""
    bounds = [f", {bound}" for bound in get_args(hint)[1:] if isinstance(bound, Bound)]
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return described(args[0]) + "".join(bounds)
    if origin in (Union, types.UnionType):
        return " or ".join("none" if arg is type(None) else described(arg) for arg in args)
    if origin is Literal:
        return " | ".join(map(str, args))
    if origin is tuple:
        return f"{described(args[0])}, …"
    return hint.kind if is_component(hint) else getattr(hint, "__name__", str(hint))


def converted(owner: str, name: str, value: Any, hint: Any) -> Any:
    """A value, or the text of one, as the hinted type and within its bounds; UsageError names what is allowed."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        if FOLLOWS in args and (is_schedule(value) or (isinstance(value, str) and value in KINDS)):
            return value if isinstance(value, Schedule) else Schedule.read(value)
        value = converted(owner, name, value, args[0])
        for bound in filter(lambda note: isinstance(note, Bound), args[1:]):
            bound.check(owner, name, value)
        return value
    if origin in (Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        return converted(owner, name, value, next(arg for arg in args if arg is not type(None)))
    if origin is Literal:
        if value not in args:
            raise UsageError(f"{owner}: {name} must be one of {', '.join(map(str, args))}, not {value!r}")
        return value
    if origin is tuple:
        items = value.split(",") if isinstance(value, str) else value if isinstance(value, Iterable) else (value,)
        return tuple(converted(owner, name, item, args[0]) for item in items if item != "")
    if origin is list:
        return [converted(owner, name, item, args[0]) for item in value]
    if origin is dict and isinstance(value, Mapping):
        return value
    if is_component(hint):
        if isinstance(value, hint):
            return value
        return value() if inspect.isclass(value) and issubclass(value, hint) else hint.from_name(str(value))
    try:
        return _simple(value, hint)
    except (ValueError, TypeError):
        raise UsageError(f"{owner}: {name} must be {_WORDS.get(hint, hint)}, not {value!r}") from None


_WORDS = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}


def _simple(value: Any, hint: Any) -> Any:
    if hint is bool:
        if isinstance(value, bool):
            return value
        text = str(value).lower()
        if text not in _TRUE + _FALSE:
            raise ValueError
        return text in _TRUE
    if hint is int:
        if isinstance(value, bool) or (isinstance(value, numbers.Real) and not float(value).is_integer()):
            raise ValueError
        return int(value)
    if hint is float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real | str):
            raise ValueError
        return float(value)
    if hint is Path:
        return Path(value)
    if (hint is str and not isinstance(value, str)) or get_origin(hint) is dict:
        raise ValueError
    return value


def finite(value: Any) -> Any:
    """Plain data with None for numbers that JSON cannot represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
