"""Faults that a simulation is told to have: who, what, when."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from paceline.errors import UsageError

Action = Literal["kill", "restart", "stop", "partition", "delay"]
Unit = Literal["time", "step", "await", "update", "event", "call"]
TargetRole = Literal["worker", "server"]

_WHO = r"(?:chief|(?:worker:|server:)?\d+)"
_FORM = re.compile(
    rf"(?P<action>[a-z]+):(?P<who>{_WHO})(?:-(?P<other>{_WHO}))?"
    r"@(?P<unit>[a-z]+)=(?P<when>[0-9.eE+-]+)(?P<rest>(,[a-z]+=[^,]+)*)$"
)
_HOW = (
    "ACTION:WHO@time=S, @step=K, @update=K or @event=K, e.g. kill:1@step=20,back=5, stop:server:0@update=7,for=2, "
    "partition:1-server:0@time=3.5,for=10 or delay:2@event=40,by=0.5"
)
_OPTIONS = {"kill": ("back",), "restart": (), "stop": ("for",), "partition": ("for",), "delay": ("by", "for")}


@dataclass(frozen=True)
class FaultTarget:
    """One process of a run."""

    role: TargetRole
    index: int

    def __str__(self) -> str:
        return str(self.index) if self.role == "worker" else f"server:{self.index}"


@dataclass(frozen=True)
class Fault:
    """`kill` a process (for good, or until `duration` seconds later), `restart` a killed one, `stop` it for `duration`
    seconds, `partition` it from all others or from `other`: messages between them wait for `duration` seconds. `delay`
    the next message of a worker by `by` seconds, or all messages of the next `duration` seconds.

    `when` counts seconds of virtual time, updates of the centre, events of the simulation, or the worker's own steps
    or awaits; a dead worker makes no steps, so the step of a restart is the centre's. `call` is inside a server's call
    of that number: its state may be half changed, so everybody returns to the newest checkpoint.
    """

    action: Action
    rank: int
    when: float
    unit: Unit = "time"
    duration: float = math.inf
    role: TargetRole = "worker"
    other: FaultTarget | None = None
    by: float = 0.0

    def __post_init__(self) -> None:
        name = f"{self.action}:{self.place}"
        if self.action not in get_args(Action):
            raise UsageError(f"a fault is one of {', '.join(get_args(Action))}, not {self.action!r}")
        if self.unit not in get_args(Unit):
            raise UsageError(f"a fault happens at time=, step=, update=, await=, event= or call=, not {self.unit!r}")
        if not (self.when >= 0 and self.duration >= 0 and math.isfinite(self.when)):
            raise UsageError(f"a fault needs when >= 0 and a duration >= 0, not {self.when:g}, {self.duration:g}")
        if self.unit != "time" and not float(self.when).is_integer():
            raise UsageError(f"{name}: {self.unit} must be a whole number, not {self.when:g}")
        if self.action in ("stop", "partition") and not math.isfinite(self.duration):
            raise UsageError(f"{name} needs an end: add ',for=SECONDS'")
        self._check_delay(name)
        if self.other is not None and (self.action != "partition" or self.other == self.place):
            raise UsageError(f"{name}-{self.other}: only a partition is between two processes, and they differ")
        if self.action == "restart" and self.unit == "await":
            raise UsageError("a dead worker awaits nothing: restart it at time= or step=")
        if self.role == "server" and self.unit in ("step", "await"):
            raise UsageError(f"{name}: a server makes no {self.unit}s; write @time=, @update=, @event= or @call=")
        if self.unit == "call" and (self.role != "server" or self.action != "kill"):
            raise UsageError(f"{name}: only a server can be killed inside a call: kill:server:0@call={self.when:g}")
        if self.action == "restart" and self.unit == "step":
            object.__setattr__(self, "unit", "update")

    def _check_delay(self, name: str) -> None:
        if self.action != "delay":
            return
        if self.role == "server":
            raise UsageError(f"{name}: give the worker whose messages are late")
        if not (self.by > 0 and math.isfinite(self.by) and math.isfinite(self.duration)):
            raise UsageError(
                f"{name} needs how much later messages arrive: add ',by=SECONDS' "
                f"(to freeze the process: stop:{self.place}@…,for=SECONDS)"
            )

    @property
    def place(self) -> FaultTarget:
        return FaultTarget(self.role, self.rank)

    def __str__(self) -> str:
        """As it is written on the command line."""
        who = f"{self.place}" if self.other is None else f"{self.place}-{self.other}"
        when = f"{self.when:g}" if float(f"{self.when:g}") == self.when else repr(self.when)
        text = f"{self.action}:{who}@{self.unit}={when}"
        if self.action == "delay":
            return f"{text},by={self.by!r}" + (f",for={self.duration!r}" if self.duration else "")
        end = {"kill": "back", "restart": ""}.get(self.action, "for")
        return f"{text},{end}={self.duration!r}" if end and math.isfinite(self.duration) else text


def parse_fault(text: str) -> Fault:
    """`kill:1@step=20,back=5` · `restart:1@update=30` · `stop:chief@time=3,for=4` · `delay:2@event=40,by=0.5` ·
    `partition:2-server:0@time=3,for=4` · `kill:server:0@call=7,back=1`."""
    match = _FORM.match(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a fault; write {_HOW}")
    action = match["action"]
    options = dict(item.split("=", 1) for item in match["rest"].split(",") if item)
    allowed = _OPTIONS.get(action, ("for",))
    if options.keys() - set(allowed):
        takes = f"only {' and '.join(f'{one}=SECONDS' for one in allowed)}" if allowed else "no option"
        raise UsageError(f"{text!r}: {action} takes {takes}")
    end = options.get("back", options.get("for", "0" if action == "delay" else "inf"))
    who = _place(match["who"])
    known: dict[str, Any] = {"action": action, "unit": match["unit"]}
    try:
        return Fault(
            **known,
            rank=who.index,
            when=float(match["when"]),
            duration=float(end),
            role=who.role,
            other=_place(match["other"]) if match["other"] else None,
            by=float(options.get("by", 0)),
        )
    except ValueError:
        raise UsageError(f"{text!r} has something that is not a number; write {_HOW}") from None


def _place(text: str) -> FaultTarget:
    role, _, index = text.rpartition(":")
    return FaultTarget("server" if role == "server" else "worker", 0 if index == "chief" else int(index))


def check_faults(faults: Sequence[Fault], workers: int, servers: int = 1) -> None:
    """Refuse faults of processes that do not exist."""
    for fault in faults:
        for place in (fault.place, fault.other):
            if place is None:
                continue
            there = workers if place.role == "worker" else servers
            if not 0 <= place.index < there:
                known = f"{place.role}s are 0 to {there - 1}" if there else "this run has no server"
                raise UsageError(f"a fault names {place.role} {place.index}; {known}")
