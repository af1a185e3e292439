"""Whole schedules of faults: those that were written down, and those that a seed draws."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.errors import UsageError
from paceline.sampling import mixed
from paceline.simulator.faults import Fault, FaultTarget, parse_fault

RANDOM = "random"
_HOW = "random:seed=7,count=5"


@dataclass(frozen=True)
class RunSize:
    """Who can be struck, and about how long the run lasts, in updates of the centre."""

    workers: int
    servers: int
    updates: int


def planned(given: Iterable[str | Fault], crew: RunSize) -> list[Fault]:
    """The faults that were asked for; `random:seed=7,count=5` stands for five that the seed draws."""
    found: list[Fault] = []
    for one in given:
        if isinstance(one, Fault):
            found.append(one)
        elif one.strip().partition(":")[0] == RANDOM:
            found += drawn(**_numbers(one), crew=crew)
        else:
            found.append(parse_fault(one))
    return found


def _numbers(text: str) -> dict[str, int]:
    values = {"seed": 0, "count": 5}
    for item in filter(None, text.strip().partition(":")[2].split(",")):
        key, _, value = item.partition("=")
        if key not in values or not value.isdigit():
            raise UsageError(f"{text!r} is not a schedule of faults; write {_HOW}, both whole numbers")
        values[key] = int(value)
    return values


def drawn(seed: int, count: int, crew: RunSize) -> list[Fault]:
    """`count` faults of all kinds, at any moment, all of which end: who dies comes back. The same for equal arguments.

    Half of them strike at an event of the simulation, so also between two things that happen at the same time.
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
    """Often nothing or very short, sometimes many steps long."""
    scale = (0.0, 0.1, 1.0, 8.0)[int(rng.integers(4))]
    return round(scale * float(-math.log(1.0 - rng.random())), 3)
