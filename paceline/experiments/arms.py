"""The arms of a comparison: a scheme with its hyper-parameters and a number of workers each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.config import build
from paceline.errors import UnknownName, UsageError
from paceline.scheme import Scheme

SchemeArgument = str | Scheme | type[Scheme]
SchemesArgument = SchemeArgument | Iterable[SchemeArgument] | Mapping[str, SchemeArgument]


@dataclass(frozen=True)
class Arm:
    """One scheme of a comparison. `scheme`: a name or reference; an object of the caller is in `own`."""

    label: str
    scheme: str
    workers: int
    hyper: Mapping[str, Any] = field(default_factory=dict)
    own: SchemeArgument | None = None

    @property
    def given(self) -> SchemeArgument:
        return self.scheme if self.own is None else self.own

    def built(self) -> Scheme:
        """The scheme with its hyper-parameters."""
        return build.scheme_of(self.given, self.hyper)

    def with_hyper(self, more: Mapping[str, Any]) -> Arm:
        return replace(self, hyper={**self.hyper, **more})


def arms_of(
    schemes: SchemesArgument,
    workers: Sequence[int],
    hyper: Mapping[str, Any],
) -> tuple[list[Arm], list[str]]:
    """The arms, and what was ignored. `lr=0.1` is for all schemes that have it, `downpour.lr=0.1` for one of them."""
    named = _named(schemes)
    if not named:
        raise UsageError("there is nothing to compare: give schemes, such as sync,async,downpour")
    bare: dict[str, SchemeArgument] = {}
    for label, scheme in named:
        if label in bare:
            raise UsageError(f"the scheme {label!r} is given twice; in Python a dictionary gives each its own name")
        bare[label] = scheme
    common, special, ignored = _divided(hyper, bare), _special(hyper, bare), []
    shares: dict[str, dict[str, Any]] = {label: {} for label in bare}
    for key, value in common.items():
        takers = [label for label, scheme in bare.items() if takes(scheme, key, value)]
        if not takers:
            build.scheme_of(next(iter(bare.values())), {key: value})  # raises, and suggests the nearest name
        if len(takers) < len(bare):
            ignored.append(f"{key}={value} is ignored by {', '.join(one for one in bare if one not in takers)}")
        for label in takers:
            shares[label][key] = value
    for label, own in special.items():
        shares[label] |= own
    arms = []
    for (label, scheme), number in itertools.product(bare.items(), workers):
        name = label if len(workers) == 1 else f"{label} ×{number}"
        own_object = None if isinstance(scheme, str) else scheme
        text = scheme if isinstance(scheme, str) else build.scheme_of(scheme, {}).name
        arms.append(Arm(name, text, number, shares[label], own_object))
        arms[-1].built()  # refuses wrong values
    return arms, ignored


def takes(scheme: SchemeArgument, key: str, value: Any) -> bool:
    """Whether a scheme has this hyper-parameter; an unknown scheme or a wrong value raises."""
    build.scheme_of(scheme, {})
    try:
        build.scheme_of(scheme, {key: value})
    except UnknownName:
        return False
    return True


def _named(schemes: SchemesArgument) -> list[tuple[str, SchemeArgument]]:
    if isinstance(schemes, Mapping):
        return [(str(label), scheme) for label, scheme in schemes.items()]
    listed: Iterable[SchemeArgument]
    if isinstance(schemes, str):
        listed = [word.strip() for word in schemes.split(",") if word.strip()]
    else:
        listed = [schemes] if isinstance(schemes, Scheme | type) else schemes
    return [(build.scheme_of(scheme, {}).name, scheme) for scheme in listed]


def _divided(hyper: Mapping[str, Any], labels: Iterable[str]) -> dict[str, Any]:
    """The hyper-parameters that are not of one scheme only."""
    prefixes = tuple(f"{label}." for label in labels)
    return {key: value for key, value in hyper.items() if not key.startswith(prefixes)}


def _special(hyper: Mapping[str, Any], labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for label in labels:
        own = {key.removeprefix(f"{label}."): value for key, value in hyper.items() if key.startswith(f"{label}.")}
        if own:
            found[label] = own
    return found


@dataclass(frozen=True)
class Sweep:
    """The values to choose from, by the names of hyper-parameters."""

    values: Mapping[str, tuple[str, ...]]

    @classmethod
    def read(cls, words: Iterable[str]) -> Sweep:
        """From texts such as `lr=0.01,0.03,0.1`."""
        found: dict[str, tuple[str, ...]] = {}
        for key, text in build.pairs(words).items():
            options = tuple(dict.fromkeys(one.strip() for one in str(text).split(",") if one.strip()))
            if len(options) < 2:
                raise UsageError(f"a sweep chooses among several values: write {key}=0.01,0.03,0.1, not {key}={text}")
            found[key] = options
        return cls(found)

    def candidates(self, arm: Arm) -> Iterator[dict[str, str]]:
        """Every combination of the values that an arm has; one empty combination if it has none."""
        keys = [key for key, options in self.values.items() if takes(arm.given, key, options[0])]
        for chosen in itertools.product(*(self.values[key] for key in keys)):
            yield dict(zip(keys, chosen, strict=True))
