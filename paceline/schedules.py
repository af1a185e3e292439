"""Schedules: a rate as a function of the version of the parameters, so that every process finds the same one."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

from paceline.errors import UnknownName, UsageError

Kind = Literal["constant", "step", "exponential", "linear", "cosine"]
Unit = Literal["updates", "samples", "epochs"]
KINDS, UNITS = get_args(Kind), get_args(Unit)
_DEFAULTS = {"over": 0.0, "gamma": 0.1, "lowest": 0.0, "warmup": 0.0, "every": 1.0, "unit": "updates", "per": 0.0}


class Schedule(float):
    """`cosine:0.1,over=1000,warmup=50`: a rate that depends on the number of updates before the one that it is for.

    After `warmup`, in which it grows evenly up to `base`, n further updates give

        constant      base
        step          base * gamma ^ floor(n / over)
        exponential   base * gamma ^ (n / over)
        linear        evenly from base down to `lowest` in `over` updates
        cosine        the same along half a cosine

    It changes at most every `every` updates. `warmup` and `over` are in `unit`; `per` is how many of them an update is
    (of samples and epochs, the run says it). As a number a schedule is its base: checks of bounds and
    warnings see that one. `Scheme.rates_at` puts the rate of a version in its place.
    """

    kind: Kind
    over: float
    gamma: float
    lowest: float
    warmup: float
    every: int
    unit: Unit
    per: float

    def __new__(cls, base: float, kind: str = "constant", **options: Any) -> Schedule:
        made = super().__new__(cls, base)
        if kind not in KINDS:
            raise UnknownName("schedule", kind, KINDS)
        values: dict[str, Any] = dict(_DEFAULTS)
        for name, value in options.items():
            if name not in values:
                raise UnknownName(f"option of the schedule {kind}", name, values)
            values[name] = value if name == "unit" else _number(kind, name, value)
        if values["unit"] not in UNITS:
            raise UsageError(f"schedule {kind}: unit must be one of {', '.join(UNITS)}, not {values['unit']!r}")
        if kind != "constant" and not values["over"]:
            unit = values["unit"].upper()
            raise UsageError(f"schedule {kind} needs over={unit}, the {values['unit']} that its change takes")
        if values["every"] < 1 or not values["every"].is_integer():
            raise UsageError(f"schedule {kind}: every must be a whole number of updates, not {values['every']:g}")
        values["every"] = int(values["every"])
        if values["unit"] == "updates":
            values["per"] = 1.0
        vars(made).update(values, kind=kind)
        return made

    @classmethod
    def read(cls, text: str) -> Schedule:
        """A schedule from its text: `KIND:BASE,option=value,…`."""
        kind, _, rest = text.partition(":")
        base, *words = rest.split(",")
        pairs = dict(word.partition("=")[::2] for word in words)
        if not all(pairs.values()):
            raise UsageError(
                f"{text!r} is no schedule; write KIND:RATE,option=value, as cosine:0.1,over=1000,warmup=50"
            )
        return cls(_number(kind, "rate", base), kind, **pairs)

    def at(self, v: int) -> float:
        """The rate of the update that is made of version v."""
        if not self.per:
            raise UsageError(
                f"the schedule {self} counts {self.unit}, and this run does not say how many an update takes"
            )
        v -= v % self.every
        base = float(self)
        if v * self.per < self.warmup:
            return base * (v + 1) * self.per / self.warmup if self.per != 1 else base * (v + 1) / self.warmup
        passed = (v * self.per - self.warmup) / (self.over or 1)
        rest = max(0.0, 1 - passed)
        match self.kind:
            case "step":
                return float(base * self.gamma ** math.floor(passed))
            case "exponential":
                return float(base * self.gamma**passed)
            case "linear":
                return self.lowest + (base - self.lowest) * rest
            case "cosine":
                return self.lowest + (base - self.lowest) * (1 - math.cos(math.pi * rest)) / 2
        return base

    def in_unit(self, unit: Unit, per: float) -> Schedule:
        """The same numbers in another unit, of which an update is `per`."""
        return Schedule(float(self), self.kind, **self._given() | {"unit": unit, "per": per})

    def _given(self) -> dict[str, Any]:
        given = {name: value for name, value in vars(self).items() if name != "kind" and value != _DEFAULTS[name]}
        return {name: value for name, value in given.items() if name != "per" or self.unit != "updates"}

    def __str__(self) -> str:
        words = [
            f"{name}={value if isinstance(value, str) else _short(value)}" for name, value in self._given().items()
        ]
        return f"{self.kind}:{','.join([_short(float(self)), *words])}"

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else str(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and str(self) == str(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self) -> Any:
        return Schedule.read, (str(self),)


def is_schedule(value: object) -> bool:
    """Whether a value, or the text of one, is a schedule."""
    kind, colon, _ = value.partition(":") if isinstance(value, str) else ("", "", "")
    return isinstance(value, Schedule) or (bool(colon) and kind in KINDS)


def _number(kind: str, name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise UsageError(f"schedule {kind}: {name} must be a number, not {value!r}") from None
    if not (number >= 0 and math.isfinite(number)):
        raise UsageError(f"schedule {kind}: {name} must be at least 0, not {value}")
    return number


def _short(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
