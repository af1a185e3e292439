"""Trials: a run of some scheme, and what befalls its processes. A seed and a number say all of it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config import build, discovery
from paceline.errors import UsageError
from paceline.scheme import Scheme

SPAN = 2.5  # seconds from the launcher's start within which faults come
NEAR = 0.15  # seconds between the two deaths of a pair
PATIENCE = 4.0
ANY_STEP = 0.6  # how often workers that can send messages do
TASKS = [f"{Path(__file__).with_name('small_tasks.py')}:{name}" for name in ("plain", "normed", "wide")]


@dataclass(frozen=True)
class Blow:
    """Something that is done to a process: at a time after the start, to a role, or to the launcher or the group."""

    at: float
    what: str  # kill | stop | continue | terminate | interrupt
    whom: str


@dataclass(frozen=True)
class Trial:
    """One run. `ends`: by its goal, by the clock, or by a signal that is among the blows."""

    seed: str
    scheme: str
    settings: dict[str, Any]
    hyper: dict[str, Any]
    ends: str  # goal | seconds | signal
    blows: list[Blow] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        return bool(self.settings.get("exact"))

    def chosen(self) -> Scheme:
        return build.scheme_of(self.scheme, self.hyper)


def trial(seed: int, number: int) -> Trial:
    """The trial of a number: schemes in turn, all else by chance."""
    name = f"{seed}-{number}"
    rng = random.Random(name)
    schemes = sorted(discovery.schemes())
    scheme = schemes[number % len(schemes)]
    chosen: Scheme = build.scheme_of(scheme, {})
    hyper: dict[str, Any] = {"window": rng.choice([1, 2, 5])} if hasattr(chosen, "window") else {}
    if hasattr(chosen, "partner") and random.Random(f"{name}-partner").random() < ANY_STEP:
        hyper["partner"] = "any-step"  # messages that nobody waits for
        chosen = build.scheme_of(scheme, hyper)
    settings: dict[str, Any] = {
        "task": rng.choice(TASKS),
        "workers": 1 if chosen.alone else rng.randint(2, 4),
        "servers": 1 if not chosen.methods or chosen.whole() else rng.choice([1, 2]),
        "steps": rng.choice([120, 250, 400]),
        "seed": rng.randrange(1000),
        "checkpoint_steps": rng.choice([7, 20, 60]),
        "evaluator": rng.random() < 0.3,
        "patience": PATIENCE,
        "restarts": 50,
        "summaries": rng.random() < 0.2,
        "quorum": rng.choice(["shrink", "shrink", "hold"]),
    }
    if not chosen.alone and rng.random() < 0.35:
        settings |= with_exact(chosen, rng)
    ends = rng.choices(["goal", "seconds", "signal"], [7, 1, 2])[0]
    if ends != "goal":
        settings["steps"] = 1_000_000
    if ends == "seconds":
        settings["seconds"] = 0.5 + 2 * rng.random()
    blows = _blows(rng, roles(settings, chosen))
    if ends == "signal":
        blows += _ending(rng)
    return Trial(name, scheme, settings, hyper, ends, sorted(blows, key=lambda blow: blow.at))


def with_exact(chosen: Scheme, rng: random.Random) -> dict[str, Any]:
    """The settings of an exact run, if the scheme can have one."""
    try:
        reason = chosen.exact(4)
    except UsageError:
        return {}
    return {} if reason else {"exact": True, "micro": 4, "workers": rng.randint(1, 4), "quorum": "hold"}


def roles(settings: dict[str, Any], scheme: Scheme) -> list[str]:
    workers = ["chief", *(f"worker:{rank}" for rank in range(1, settings["workers"]))]
    servers = [f"server:{shard}" for shard in range(settings["servers"])] if scheme.methods else []
    return workers + servers + (["evaluator"] if settings["evaluator"] else [])


def _blows(rng: random.Random, there: list[str]) -> list[Blow]:
    found = []
    for _ in range(rng.randint(1, 5)):
        at, whom = SPAN * rng.random(), rng.choice(there)
        kind = rng.choices(["kill", "pair", "stop", "terminate"], [4, 4, 2, 1])[0]
        if kind == "pair":
            other = rng.choice(there)
            found += [Blow(at, "kill", whom), Blow(at + NEAR * rng.random(), "kill", other)]
        elif kind == "stop":
            found.append(Blow(at, "stop", whom))
            if rng.random() < 0.9:  # otherwise patience has to end it
                found.append(Blow(at + rng.random() ** 2 * 1.5, "continue", whom))
        else:
            found.append(Blow(at, kind, whom))
    return found


def _ending(rng: random.Random) -> list[Blow]:
    at, whom = SPAN * rng.random() * 1.2, rng.choice(["launcher", "group"])
    what = rng.choice(["interrupt", "terminate"])
    again = [Blow(at + 0.3 * rng.random(), what, whom)] if rng.random() < 0.3 else []
    return [Blow(at, what, whom), *again]
