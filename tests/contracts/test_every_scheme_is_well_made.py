"""The form of a scheme file: what its class is, what its docstring says, which values it refuses."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import re
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from beds.short_windows import short
from simulated_runs import crew, scheme_named

from paceline import fields as field_types
from paceline import simulate
from paceline.config import build, discovery
from paceline.config.listing import SCHEME_FAMILIES
from paceline.errors import UnknownName, UsageError
from paceline.fields import Bound, bounds
from paceline.rules import Rule
from paceline.rules import rules as update_rules
from paceline.scheme import Scheme, fields

LINES = 200
LISTING = re.compile(r"^\s*(worker|server)( i)?:\s+\S", re.MULTILINE)
YEAR = re.compile(r"\b(19[5-9]\d|20[0-4]\d)\b")


def found(name: str) -> type[Scheme]:
    value: type[Scheme] = discovery.schemes()[name].value
    return value


def test_a_frozen_dataclass_with_a_name(name: str) -> None:
    scheme = found(name)
    assert scheme.name == name
    assert re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name)
    assert dataclasses.is_dataclass(scheme)
    assert scheme.__dataclass_params__.frozen  # type: ignore[attr-defined]
    made = scheme()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.lr = 1.0  # type: ignore[attr-defined]
    assert made == scheme()
    assert hash(made) == hash(scheme())


def test_the_docstring_cites_and_lists(name: str) -> None:
    """The summary, then where it comes from, then the listing as in the paper."""
    text = inspect.getdoc(found(name)) or ""
    assert found(name).__doc__ is not Scheme.__doc__
    summary, _, rest = text.partition("\n")
    assert summary.endswith(".")
    assert len(summary) <= 120
    assert YEAR.search(rest) or "guides" in rest, "no year: cite where it comes from"
    sides = {side for side, _ in LISTING.findall(text)}
    assert "worker" in sides, "no 'worker:' line"
    assert ("server" in sides) or all(not method.atomic for method in found(name).methods.values())


def test_the_catalogue_has_its_facts(name: str) -> None:
    """`paceline list schemes`, `paceline show` and docs/schemes.md show them: declared by the class itself."""
    scheme = found(name)
    for fact in ("family", "good_for", "volume", "limit"):
        assert fact in vars(scheme), f"{scheme.__name__} has no {fact}"
        assert str(getattr(scheme, fact)).strip(), f"{scheme.__name__}: {fact} is empty"
    assert scheme.family in SCHEME_FAMILIES
    assert scheme.family != "others"


def test_the_file_is_small(name: str) -> None:
    source = inspect.getsourcefile(found(name))
    assert source is not None
    assert len(Path(source).read_text(encoding="utf-8").splitlines()) <= LINES


def test_the_servers_methods_are_typed(name: str) -> None:
    for method in found(name).methods.values():
        signature = method.signature
        missing = [key for key, p in list(signature.parameters.items())[1:] if p.annotation is inspect.Parameter.empty]
        assert not missing, f"{method.name}: no type for {missing}"
        assert signature.return_annotation is not inspect.Signature.empty, f"{method.name}: no result type"
        first = list(signature.parameters)[:2]
        assert first == ["self", "s"]
        assert (method.when is None) or method.guard_text() not in ("", "no guard", "when=")


def test_nothing_random_and_no_clock(name: str) -> None:
    """A server method is a function of its arguments: the order of the calls alone fixes the run."""
    source = inspect.getsourcefile(found(name))
    assert source is not None
    tree = ast.parse(Path(source).read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not imported & {"random", "time", "datetime", "os", "secrets", "asyncio", "threading"}


def test_every_field_has_a_type_and_a_default(name: str) -> None:
    for field, hint in fields(found(name)):
        assert hint is not Any
        assert field.default is not dataclasses.MISSING, f"{field.name} has no default"
        assert field_types.described(hint)


def test_unknown_words_are_refused_with_a_suggestion(name: str) -> None:
    words = build.keys_of(found(name))
    for word in (word for word in words if "." not in word):
        wrong = word + "x"
        with pytest.raises(UnknownName, match=re.escape(f"no hyper-parameter of {name} {wrong!r}; did you mean")):
            build.scheme_of(name, {wrong: "1"})
    with pytest.raises(UnknownName, match=f"no hyper-parameter of {name} 'zzzzzz'; there are: "):
        build.scheme_of(name, {"zzzzzz": "1"})
    with pytest.raises(UnknownName):
        simulate("toy", name, workers=crew(name), steps=1, zzzzzz=1)


def test_every_value_out_of_its_bound_is_refused(name: str) -> None:
    for field, hint in fields(found(name)):
        for bound in bounds(hint):
            for value in outside(bound, hint):
                with pytest.raises(UsageError, match=f"{field.name} must be {re.escape(str(bound))}"):
                    found(name)(**{field.name: value})
                text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                with pytest.raises(UsageError, match=field.name):
                    build.scheme_of(name, {field.name: text})


def outside(bound: Bound, hint: Any) -> list[Any]:
    whole = int in _plain(hint)
    below = bound.low - 1 if whole else (-1e-9 if bound.low == 0 else bound.low - 1)
    values = [int(below)] if whole else [below, math.nan, -math.inf]
    if bound.high != math.inf:
        values.append(bound.high + 1)
    return [(value,) for value in values] if get_origin(hint) is tuple else values


def _plain(hint: Any) -> set[Any]:
    parts = get_args(hint)
    return set().union(*map(_plain, parts)) if parts else {hint}


def test_values_of_another_kind_are_refused(name: str) -> None:
    for field, hint in fields(found(name)):
        wrong = "no-such-thing"
        with pytest.raises(UsageError, match="no-such-thing"):
            build.scheme_of(name, {field.name: wrong})
        if get_origin(hint) is Literal:
            for value in get_args(hint):
                assert getattr(build.scheme_of(name, {field.name: value}), field.name) == value


def test_the_words_of_a_scheme_make_it_again(name: str) -> None:
    """What a result says of the hyper-parameters is enough to repeat the run, as values and as text."""
    scheme = scheme_named(name)
    plain = build.hyper_of(scheme)
    assert build.scheme_of(name, plain) == scheme
    texts = {key: ",".join(map(str, v)) if isinstance(v, tuple) else str(v) for key, v in plain.items()}
    assert build.scheme_of(name, texts) == scheme
    other = {"rule": "momentum", "rule.momentum": 0.5, "rule.lr": 0.25, "lr": 0.125}
    known = {key: value for key, value in other.items() if key.split(".")[0] in build.keys_of(found(name))}
    changed = build.scheme_of(name, known)
    assert build.scheme_of(name, build.hyper_of(changed)) == changed


def test_optional_values_take_none(name: str) -> None:
    for field, hint in fields(found(name)):
        if get_origin(hint) in (Union, types.UnionType):
            assert getattr(build.scheme_of(name, {field.name: "none"}), field.name) is None
            assert getattr(build.scheme_of(name, {field.name: None}), field.name) is None


def test_every_rule_runs_or_is_refused_before_the_run(name: str) -> None:
    for field, hint in fields(found(name)):
        if hint is not Rule:
            continue
        for rule in update_rules():
            try:
                result = simulate(
                    "toy",
                    name,
                    workers=crew(name, 2),
                    steps=3,
                    warn=lambda text: None,
                    **short(name) | {field.name: rule, "lr": 1e-3},
                )
            except UsageError as error:
                assert rule in str(error)  # noqa: PT017  a refusal names the rule
            else:
                assert result.updates == 3
                assert math.isfinite(result.loss)


def test_no_workers_at_all_is_refused(name: str) -> None:
    for workers in (0, -1):
        with pytest.raises(UsageError, match="workers must be at least 1"):
            simulate("toy", name, workers=workers, steps=1)


def test_it_is_found_by_its_reference_too(name: str) -> None:
    scheme = found(name)
    assert discovery.scheme(f"{scheme.__module__}:{scheme.__qualname__}") is scheme
    assert discovery.anything(name)[0] == "schemes"
    assert discovery.schemes()[name].summary == (inspect.getdoc(scheme) or "").splitlines()[0]


def test_no_word_hides_an_argument_of_simulate(name: str) -> None:
    taken = set(inspect.signature(simulate).parameters) - {"hyper"}
    assert not taken & {field.name for field, _ in fields(found(name))}
