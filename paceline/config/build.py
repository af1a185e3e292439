"""Turns names and `key=value` words into schemes and tasks, and refuses what does not fit."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_type_hints

from paceline.compressed_sites import MEET, SEND
from paceline.compressor import Compressor
from paceline.config import discovery
from paceline.config.options import declared
from paceline.errors import UnknownName, UsageError
from paceline.fields import Component, converted, is_component
from paceline.hook import Hook
from paceline.schedules import Schedule
from paceline.scheme import Scheme, fields
from paceline.task import Task
from paceline.torch_task.random_numbers import all_seeded

# what other libraries and papers call a hyper-parameter
_SYNONYMS = {
    **dict.fromkeys(("learning_rate", "learningrate", "learn_rate", "step_size", "eta"), "lr"),
    **dict.fromkeys(("optimizer", "optim", "update_rule"), "rule"),
    **dict.fromkeys(("communication_window", "comm_window", "local_steps", "period", "tau"), "window"),
    **dict.fromkeys(("replicas_to_aggregate", "backup"), "aggregate"),
}


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


def split(words: list[str], function: Callable[..., Any], *options: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """The hyper-parameters and the `task.` options among the words of a command. A word that is an argument of
    `function` is refused: people mean the flag, which one of the dataclasses `options` declares."""
    given = pairs(words)
    task_options = {key.removeprefix("task."): value for key, value in given.items() if key.startswith("task.")}
    hyper = {key: value for key, value in given.items() if not key.startswith("task.")}
    flags = {one.argument: one.flag for cls in options for one in declared(cls).values()}
    for key in hyper.keys() & inspect.signature(function).parameters.keys():
        flag = flags.get(key) or f"--{key.replace('_', '-')}"
        raise UsageError(f"{key!r} is not a hyper-parameter; if you mean the option, write {flag}")
    return hyper, task_options


def scheme_of(scheme: str | Scheme | type[Scheme], hyper: Mapping[str, Any]) -> Scheme:
    """A scheme by name, class or instance, with hyper-parameters (`lr`, `rule`, `rule.beta1`, `server.rule`, …)."""
    if isinstance(scheme, Scheme):
        scheme = scheme.source
        kept = {field.name: getattr(scheme, field.name) for field, _ in fields(type(scheme))}
        if not hyper:
            return scheme
        return _built(type(scheme), hyper, kept).compressed(scheme.compressor).fitted(scheme.parameters)
    return _built(discovery.scheme(scheme) if isinstance(scheme, str) else scheme, hyper, {})


def task_of(task: str | Task, options: Mapping[str, Any]) -> Task:
    """A task by name, reference or instance, with its own options. A function that builds a model as it makes the task
    draws the same first weights in every process of a run, and in its replay."""
    with all_seeded(0):
        named = discovery.task(task) if isinstance(task, str) else task
    if isinstance(named, Task):
        if options:
            raise UsageError(f"task {named.name!r} is already made and takes no options, not {', '.join(options)}")
        return named
    if not callable(named):
        kind = type(named).__name__
        raise UsageError(f"{task!r} is a {kind}; a task is a paceline.Task or a function that makes one")
    parameters = inspect.signature(named).parameters
    values = _values(f"task {task}", named, parameters, options)
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and parameter.kind not in free and key not in options:
            raise UsageError(f"task {task} needs {key}: give it as task.{key}=VALUE")
    with all_seeded(0):  # once more: reading the file, and its imports, draw only the first time in a process
        built = named(**values)
    if not isinstance(built, Task):
        raise UsageError(f"{task!r} gave a {type(built).__name__}, not a paceline.Task")
    return built


def compressor_of(compressor: str | Compressor) -> Compressor | None:
    """A compressor, or `name`, `name:value`, `name:key=value,key=value`; a value without a key is that of the first
    option. The name may be `file.py:Class` or `package.module:Class`. None for `none`."""
    if isinstance(compressor, Compressor) or compressor == "none":
        return compressor if isinstance(compressor, Compressor) else None
    name, _, rest = compressor.partition(":")
    if "." in name or "/" in name:  # a reference has a colon of its own
        attribute, _, rest = rest.partition(":")
        name = f"{name}:{attribute}"
    cls = discovery.compressor(name)
    first, _, others = rest.partition(",")
    if first and "=" not in first:
        known = dataclasses.fields(cls)
        if not known:
            raise UsageError(f"compressor {name} has no options, not {first!r}")
        rest = f"{known[0].name}={first}" + (f",{others}" if others else "")
    return cls().with_options(pairs(filter(None, rest.split(","))))


def compressing(scheme: Scheme, compressor: str | Compressor) -> Scheme:
    """A scheme with a compressor for what it sends; by default that of its paper, if it has one."""
    found = compressor_of(compressor or scheme.compression or "none")
    if found is not None and scheme.sends_messages() and SEND not in scheme.compresses:
        raise UsageError(f"{scheme.name} does not say that its messages can be compressed; omit --compress {found}")
    if found is not None and not scheme.compresses:
        able = ", ".join(name for name, one in discovery.schemes().items() if one.value.compresses)
        raise UsageError(
            f"{scheme.name} sends no gradients or differences of parameters; what it sends would be damaged by "
            f"compression. Schemes that can be compressed: {able}"
        )
    if found is not None and MEET in scheme.compresses and not found.points:
        able = ", ".join(name for name, one in discovery.compressors().items() if one.value().points)
        raise UsageError(
            f"{scheme.name}: workers give each other their models, and {found} is for gradients and differences of "
            f"parameters: it would damage models. Compressors of models: {able} (without feedback), or qsgd:127"
        )
    return scheme.compressed(found)


def hook_of(hook: str | Hook) -> Hook:
    """A hook, or `name`, `name:key=value,key=value`; the name may be `file.py:Class` or `package.module:Class`."""
    if isinstance(hook, Hook):
        return hook
    name, _, rest = hook.partition(":")
    attribute, _, options = rest.partition(":")
    if attribute and "=" not in attribute:  # a reference has a colon of its own
        name, rest = f"{name}:{attribute}", options
    cls = discovery.hook(name)
    if not (inspect.isclass(cls) and issubclass(cls, Hook) and dataclasses.is_dataclass(cls)):
        raise UsageError(f"{name!r} is not a hook: it must name a dataclass that is a paceline.Hook")
    words: list[str] = []
    for word in filter(None, rest.split(",")):
        if "=" in word or not words:
            words.append(word)
        else:
            words[-1] += f",{word}"  # one more item of a list
    known = [field.name for field in dataclasses.fields(cls)]
    built: Hook = cls(**_values(f"hook {name}", cls, known, pairs(words)))
    return built


def _values(owner: str, taker: Any, known: Iterable[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options given to a class or function, in the types that it declares."""
    for key in given:
        if key not in known:
            raise UnknownName(f"option of {owner}", key, known)
    hints = get_type_hints(taker, include_extras=True)
    return {key: converted(owner, key, value, hints.get(key, Any)) for key, value in given.items()}


def keys_of(scheme: type[Scheme]) -> list[str]:
    """The words that a scheme takes on the command line."""
    return [_shown(field.name, hint) for field, hint in fields(scheme)]


def hyper_of(scheme: Scheme) -> dict[str, Any]:
    """The hyper-parameters that a scheme has, as plain data."""
    plain: dict[str, Any] = {}
    for field, hint in fields(type(scheme)):
        value = getattr(scheme, field.name)
        if isinstance(value, Component):
            key = _shown(field.name, hint)
            plain[key] = value.name
            prefix = "server" if key == "server.rule" else field.name
            plain |= {f"{prefix}.{name}": _plain(option) for name, option in value.given().items()}
        else:
            plain[field.name] = _plain(value)
    return plain


def given_to(scheme: Scheme) -> dict[str, Any]:
    """The hyper-parameters of a scheme that are not the defaults of its class."""
    values = {
        _shown(field.name, hint): (getattr(scheme, field.name), field.default) for field, hint in fields(type(scheme))
    }
    return {key: value for key, (value, default) in values.items() if value != default}


def adopted(scheme: type[Scheme], hyper: Mapping[str, Any]) -> tuple[Scheme, dict[str, str]]:
    """A scheme with those hyper-parameters, given to another one, that it can have, and why it cannot have the rest."""
    kept: dict[str, Any] = {}
    dropped: dict[str, str] = {}
    for key in sorted(hyper, key=lambda key: "." in key.removeprefix("server.")):  # a rule comes before its options
        try:
            scheme_of(scheme, kept | {key: hyper[key]})
            kept[key] = hyper[key]
        except UnknownName:
            dropped[key] = f"{scheme.name} has no such hyper-parameter"
        except UsageError as error:
            dropped[key] = str(error)
    return scheme_of(scheme, kept), dropped


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Schedule) else value


def _shown(field: str, hint: Any) -> str:
    return "server.rule" if is_component(hint) and field == "server_rule" else field


def _built(cls: type[Scheme], hyper: Mapping[str, Any], kept: dict[str, Any]) -> Scheme:
    known = {field.name: hint for field, hint in fields(cls)}
    defaults = {field.name: field.default for field, _ in fields(cls)} | kept
    values: dict[str, Any] = dict(kept)
    options: dict[str, dict[str, Any]] = {}
    for key, value in hyper.items():
        own = _own_key(key, cls, known)
        if own != key and own in hyper:
            raise UsageError(f"{cls.name}: {key!r} and {own!r} mean the same here; give one of them")
        head, _, option = own.partition(".")
        if key in cls.retired:
            if converted(cls.name, key, value, bool):
                raise UsageError(f"{cls.name} has no {key!r} any more: {cls.retired[key]}")
        elif option and is_component(known.get(head)):
            options.setdefault(head, {})[option] = value
        elif not option and head in known:
            values[head] = converted(cls.name, key, value, known[head])
        else:
            words = [_shown(name, hint) for name, hint in known.items()]
            raise UnknownName(f"hyper-parameter of {cls.name}", key, words, _SYNONYMS.get(key.replace("-", "_")))
    for head, given in options.items():
        values[head] = _with_options(known[head], values.get(head, defaults[head]), given)
    return cls(**values)


def value_of(scheme: Scheme, key: str) -> Any:
    """A hyper-parameter of a scheme by the word of the command line: `lr`, `rule.beta1`, `server.lr`, …."""
    known = {field.name: hint for field, hint in fields(type(scheme))}
    head, _, option = _own_key(key, type(scheme), known).partition(".")
    if head not in known or (option and not is_component(known[head])):
        raise UnknownName(f"hyper-parameter of {scheme.name}", key, keys_of(type(scheme)))
    value = getattr(scheme, head)
    if not option:
        return value
    options = {one.name for one in dataclasses.fields(value)}
    if option not in options:
        raise UnknownName(f"option of {value.kind} {value.name}", option, options)
    return getattr(value, option)


def _own_key(key: str, cls: type[Scheme], known: Mapping[str, Any]) -> str:
    """`server.rule` and `server.lr` speak of the server's rule; where the only rule is the server's, of that one."""
    if not key.startswith("server."):
        return key
    option = key.removeprefix("server.")
    if "server_rule" in known:
        return "server_rule" if option == "rule" else f"server_rule.{option}"
    if not cls.rule_at_server:
        return key
    return option if option in ("rule", "lr") else f"rule.{option}"


def _with_options(kind: type[Component], value: Component | str, given: Mapping[str, Any]) -> Component:
    component = value if isinstance(value, Component) else kind.from_name(value)
    return component.with_options(given)
