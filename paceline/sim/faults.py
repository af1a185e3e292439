"""Faults that a simulation is told to have: who, what, when."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from paceline.errors import UsageError

Action = Literal["kill", "restart", "delay", "partition"]
Unit = Literal["time", "step", "await", "update"]

_FORM = re.compile(
    r"(?P<action>[a-z]+):(?P<rank>\d+)@(?P<unit>[a-z]+)=(?P<when>[0-9.eE+-]+)(?P<rest>(,[a-z]+=[^,]+)*)$"
)
_HOW = "ACTION:RANK@time=S, @step=K or @update=K, e.g. kill:1@step=20,back=5 or partition:2@time=3.5,for=10"


@dataclass(frozen=True)
class Fault:
    """`kill` a worker (for good, or until `back` seconds later), `restart` a killed one, `delay` everything that it
    does for `duration` seconds, or `partition` it: its messages wait until `duration` seconds have passed.

    `when` counts seconds of virtual time, updates of the centre, or the worker's own steps or awaits; a dead worker
    makes no steps, so the step of a restart is the centre's.
    """

    action: Action
    rank: int
    when: float
    unit: Unit = "time"
    duration: float = math.inf

    def __post_init__(self) -> None:
        if self.action not in get_args(Action):
            raise UsageError(f"a fault is one of {', '.join(get_args(Action))}, not {self.action!r}")
        if self.unit not in get_args(Unit):
            raise UsageError(f"a fault happens at time=, step=, update= or await=, not {self.unit!r}")
        if not (self.when >= 0 and self.duration >= 0 and math.isfinite(self.when)):
            raise UsageError(f"a fault needs when >= 0 and a duration >= 0, not {self.when:g}, {self.duration:g}")
        if self.unit != "time" and not float(self.when).is_integer():
            raise UsageError(f"{self.action}:{self.rank}: {self.unit} must be a whole number, not {self.when:g}")
        if self.action in ("delay", "partition") and not math.isfinite(self.duration):
            raise UsageError(f"{self.action}:{self.rank} needs an end: add ',for=SECONDS'")
        if self.action == "restart" and self.unit == "await":
            raise UsageError("a dead worker awaits nothing: restart it at time= or step=")
        if self.action == "restart" and self.unit == "step":
            object.__setattr__(self, "unit", "update")


def parse_fault(text: str) -> Fault:
    """`kill:1@step=20,back=5` · `restart:1@update=30` · `delay:2@time=3,for=4` · `partition:2@time=3,for=4`."""
    match = _FORM.match(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a fault; write {_HOW}")
    options = dict(item.split("=", 1) for item in match["rest"].split(",") if item)
    end = {"kill": "back", "restart": ""}.get(match["action"], "for")
    if options.keys() - {end}:
        raise UsageError(f"{text!r}: {match['action']} takes {f'only {end}=SECONDS' if end else 'no option'}")
    try:
        return Fault(
            action=match["action"],  # type: ignore[arg-type]
            rank=int(match["rank"]),
            when=float(match["when"]),
            unit=match["unit"],  # type: ignore[arg-type]
            duration=float(options.get(end, math.inf)),
        )
    except ValueError:
        raise UsageError(f"{text!r} has something that is not a number; write {_HOW}") from None


def check_faults(faults: Sequence[Fault], workers: int) -> None:
    """Refuse faults of workers that do not exist."""
    for fault in faults:
        if not 0 <= fault.rank < workers:
            raise UsageError(f"a fault names worker {fault.rank}; workers are 0 to {workers - 1}")
