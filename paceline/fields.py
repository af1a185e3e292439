"""Values and the types they must have: texts of the command line, arguments from Python."""

from __future__ import annotations

import inspect
import numbers
import types
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from paceline.errors import UsageError
from paceline.rules import Rule, made
from paceline.scheme import Bound

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


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
    return "rule" if hint is Rule else getattr(hint, "__name__", str(hint))


def converted(owner: str, name: str, value: Any, hint: Any) -> Any:
    """A value, or the text of one, as the hinted type; UsageError names what is allowed."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return converted(owner, name, value, args[0])
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
    if hint is Rule:
        if isinstance(value, Rule):
            return value
        return value() if inspect.isclass(value) and issubclass(value, Rule) else made(str(value))
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
    if hint is str and not isinstance(value, str):
        raise ValueError
    return value
