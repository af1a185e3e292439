"""Turns names and `key=value` words into schemes and tasks, and refuses what does not fit."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from paceline import find
from paceline.errors import UnknownName, UsageError
from paceline.hook import Hook
from paceline.rules import Rule, made
from paceline.scheme import Bound, Scheme, fields
from paceline.task import Task

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def pairs(words: Iterable[str]) -> dict[str, str]:
    """`["lr=0.1", "window=5"]` as a dictionary."""
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise UsageError(f"{word!r} is not a hyper-parameter; write it as key=value")
        if key in found:
            raise UsageError(f"{key!r} is given twice: {found[key]!r} and {value!r}")
        found[key] = value
    return found


def scheme_of(scheme: str | Scheme | type[Scheme], hyper: Mapping[str, Any]) -> Scheme:
    """A scheme by name, class or instance, with hyper-parameters (`lr`, `rule`, `rule.beta1`, `server.rule`, …)."""
    if isinstance(scheme, Scheme):
        kept = {field.name: getattr(scheme, field.name) for field, _ in fields(type(scheme))}
        return _built(type(scheme), hyper, kept) if hyper else scheme
    return _built(find.scheme(scheme) if isinstance(scheme, str) else scheme, hyper, {})


def task_of(task: str | Task, options: Mapping[str, Any]) -> Task:
    """A task by name, reference or instance, with its own options."""
    named = find.task(task) if isinstance(task, str) else task
    if isinstance(named, Task):
        if options:
            raise UsageError(f"task {named.name!r} is already made and takes no options, not {', '.join(options)}")
        return named
    if not callable(named):
        raise UsageError(
            f"{task!r} is a {type(named).__name__}; a task is a paceline.Task or a function that makes one"
        )
    hints = get_type_hints(named)
    parameters = inspect.signature(named).parameters
    for key in options:
        if key not in parameters:
            raise UnknownName(f"option of task {task}", key, parameters)
    values = {key: converted(f"task {task}", key, value, hints.get(key, Any)) for key, value in options.items()}
    built = named(**values)
    if not isinstance(built, Task):
        raise UsageError(f"{task!r} gave a {type(built).__name__}, not a paceline.Task")
    return built


def hook_of(hook: str | Hook) -> Hook:
    """A hook, or `name`, `name:key=value,key=value`."""
    if isinstance(hook, Hook):
        return hook
    name, _, rest = hook.partition(":")
    if name.endswith(".py"):  # a reference has a colon of its own
        attribute, _, rest = rest.partition(":")
        name = f"{name}:{attribute}"
    cls = find.hook(name)
    if not (inspect.isclass(cls) and issubclass(cls, Hook) and dataclasses.is_dataclass(cls)):
        raise UsageError(f"{name!r} is not a hook: it must name a dataclass that is a paceline.Hook")
    hints = get_type_hints(cls, include_extras=True)
    known = [field.name for field in dataclasses.fields(cls)]
    given = pairs(filter(None, rest.split(",")))
    for key in given:
        if key not in known:
            raise UnknownName(f"option of hook {name}", key, known)
    values = {key: converted(f"hook {name}", key, text, hints[key]) for key, text in given.items()}
    for key, value in values.items():
        for bound in get_args(hints[key])[1:]:
            if isinstance(bound, Bound):
                bound.check(f"hook {name}", key, value)
    built: Hook = cls(**values)
    return built


def keys_of(scheme: type[Scheme]) -> list[str]:
    """The words that a scheme takes on the command line."""
    return [_shown(field.name, hint) for field, hint in fields(scheme)]


def hyper_of(scheme: Scheme) -> dict[str, Any]:
    """The hyper-parameters that a scheme has, as plain data."""
    plain: dict[str, Any] = {}
    for field, hint in fields(type(scheme)):
        value = getattr(scheme, field.name)
        if isinstance(value, Rule):
            key = _shown(field.name, hint)
            plain[key] = value.name
            prefix = "server" if key == "server.rule" else "rule"
            for option in dataclasses.fields(value):
                if getattr(value, option.name) != option.default:
                    plain[f"{prefix}.{option.name}"] = getattr(value, option.name)
        else:
            plain[field.name] = value
    return plain


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
        return value if isinstance(value, Rule) else made(str(value))
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
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise ValueError
        return int(value)
    if hint is float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        return float(value)
    if hint is str and not isinstance(value, str):
        raise ValueError
    return value


def _shown(field: str, hint: Any) -> str:
    return "server.rule" if hint is Rule and field == "server_rule" else field


def _built(cls: type[Scheme], hyper: Mapping[str, Any], kept: dict[str, Any]) -> Scheme:
    known = {field.name: hint for field, hint in fields(cls)}
    defaults = {field.name: field.default for field, _ in fields(cls)} | kept
    values: dict[str, Any] = dict(kept)
    options: dict[str, dict[str, Any]] = {}
    for key, value in hyper.items():
        head, _, option = _own_key(key, known).partition(".")
        if option and known.get(head) is Rule:
            options.setdefault(head, {})[option] = value
        elif not option and head in known:
            values[head] = converted(cls.name, key, value, known[head])
        else:
            words = [_shown(name, hint) for name, hint in known.items()]
            raise UnknownName(f"hyper-parameter of {cls.name}", key, words)
    for head, given in options.items():
        values[head] = _with_options(values.get(head, defaults[head]), given)
    return cls(**values)


def _own_key(key: str, known: Mapping[str, Any]) -> str:
    """`server.rule` and `server.lr` speak of the server's rule; where a scheme has one rule only, of that one."""
    if not key.startswith("server."):
        return key
    option = key.removeprefix("server.")
    if "server_rule" in known:
        return "server_rule" if option == "rule" else f"server_rule.{option}"
    if "rule" not in known:
        return key
    return option if option in ("rule", "lr") else f"rule.{option}"


def _with_options(rule: Rule | str, given: Mapping[str, Any]) -> Rule:
    rule = rule if isinstance(rule, Rule) else made(rule)
    hints = get_type_hints(type(rule), include_extras=True)
    known = [field.name for field in dataclasses.fields(rule)]
    for key in given:
        if key not in known:
            raise UnknownName(f"option of rule {rule.name}", key, known)
    owner = f"rule {rule.name}"
    return dataclasses.replace(rule, **{k: converted(owner, k, v, hints[k]) for k, v in given.items()})
