"""The faults of a simulation: which process, what happens to it, and when; given one by one or drawn from a seed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from paceline.errors import UsageError
from paceline.sampling import mixed

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
    of that number: its state may be half changed, so the whole run returns to the newest checkpoint.
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
        """The process that it strikes."""
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
    """UsageError for faults of processes that do not exist."""
    for fault in faults:
        for place in (fault.place, fault.other):
            if place is None:
                continue
            there = workers if place.role == "worker" else servers
            if not 0 <= place.index < there:
                known = f"{place.role}s are 0 to {there - 1}" if there else "this run has no server"
                raise UsageError(f"a fault names {place.role} {place.index}; {known}")


@dataclass(frozen=True)
class RunSize:
    """The processes that faults can strike, and the length of the run in updates of the centre."""

    workers: int
    servers: int
    updates: int


def planned(given: Iterable[str | Fault], crew: RunSize) -> list[Fault]:
    """The faults that the user gives; `random:seed=7,count=5` stands for five that are drawn from the seed."""
    found: list[Fault] = []
    for one in given:
        if isinstance(one, Fault):
            found.append(one)
        elif one.strip().partition(":")[0] == "random":
            found += drawn(**_numbers(one), crew=crew)
        else:
            found.append(parse_fault(one))
    return found


def _numbers(text: str) -> dict[str, int]:
    values = {"seed": 0, "count": 5}
    for item in filter(None, text.strip().partition(":")[2].split(",")):
        key, _, value = item.partition("=")
        if key not in values or not value.isdigit():
            raise UsageError(f"{text!r} is not a schedule of faults; write random:seed=7,count=5, both whole numbers")
        values[key] = int(value)
    return values


def drawn(seed: int, count: int, crew: RunSize) -> list[Fault]:
    """`count` faults of all kinds, at any moment. All of them end: a killed process is restarted.

    Half of them strike at an event of the simulation, so also between two events of the same time.
    """
    rng = np.random.Generator(np.random.PCG64(mixed(seed, "faults", crew.workers, crew.servers, crew.updates)))
    return [_one(rng, crew) for _ in range(count)]


def _one(rng: np.random.Generator, crew: RunSize) -> Fault:
    worker = FaultTarget("worker", int(rng.integers(crew.workers)))
    server = FaultTarget("server", int(rng.integers(crew.servers))) if crew.servers else None
    kinds = ["kill", "kill", "stop", "partition", "delay"]
    if server is not None:
        kinds += ["kill server", "kill server", "inside a call", "inside a call", "stop server"]
    kind = kinds[int(rng.integers(len(kinds)))]
    action, _, of_server = kind.partition(" ")
    duration = _seconds(rng)
    if kind == "inside a call":
        assert server is not None
        number = int(rng.integers(1, 4 * crew.updates * max(1, crew.workers // 2) + 2))
        return Fault("kill", server.index, number, "call", duration, "server")
    struck = server if of_server and server is not None else worker
    when: dict[str, Any] = _moment(rng, crew, struck)
    if action == "delay":
        whole = rng.random() < 0.5
        return Fault("delay", worker.index, **when, duration=duration if whole else 0.0, by=max(_seconds(rng), 0.01))
    if action == "partition":
        return Fault("partition", worker.index, **when, duration=duration, other=_other(rng, crew, worker))
    return Fault(action, struck.index, **when, duration=duration, role=struck.role)  # type: ignore[arg-type]


def _other(rng: np.random.Generator, crew: RunSize, worker: FaultTarget) -> FaultTarget | None:
    others = [FaultTarget("server", k) for k in range(crew.servers)]
    others += [FaultTarget("worker", r) for r in range(crew.workers) if r != worker.index]
    number = int(rng.integers(len(others) + 2))
    return others[number] if number < len(others) else None


def _moment(rng: np.random.Generator, crew: RunSize, struck: FaultTarget) -> dict[str, Any]:
    draw = rng.random()
    if draw < 0.5:
        return {"when": int(rng.integers(0, 8 * crew.updates * max(1, crew.workers // 2) + 8)), "unit": "event"}
    if draw < 0.7:
        return {"when": round(float(rng.random()) * 2 * crew.updates, 3), "unit": "time"}
    if draw < 0.85 or struck.role == "server":
        return {"when": int(rng.integers(0, crew.updates + 1)), "unit": "update"}
    if draw < 0.95:
        return {"when": int(rng.integers(1, 6 * crew.updates + 1)), "unit": "await"}
    return {"when": int(rng.integers(0, crew.updates + 1)), "unit": "step"}


def _seconds(rng: np.random.Generator) -> float:
    """A duration: often 0 or very short, sometimes as long as many steps."""
    scale = (0.0, 0.1, 1.0, 8.0)[int(rng.integers(4))]
    return round(scale * float(-math.log(1.0 - rng.random())), 3)
