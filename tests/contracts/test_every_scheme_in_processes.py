"""Every scheme in real processes: it does what it was asked for, learns what it learns in virtual time, and where its
order is fixed gives the simulator's very bits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from beds.short_windows import short
from real_runs import default, servers, trained
from simulated_runs import crew, scheme_named

from paceline import simulate
from paceline.errors import UsageError
from paceline.fields import Rate
from paceline.result import Result
from paceline.scheme import Scheme, State, Vector, on_server
from paceline.worker import Worker

TASK = "digits-mlp"
SEEDS = range(2)
NOISE = 0.05  # of the mean accuracy: the order of real pushes differs from run to run, more so on a busy machine


def at_most(name: str, workers: int, asked: int) -> int:
    """Where workers write into the vector themselves, each may be inside one more update when the last one is made."""
    direct = any(not method.atomic for method in default(name).methods.values())
    return asked + (workers - 1 if direct else 0)


def check_counts(run: Result, name: str, workers: int, asked: int, shards: int) -> None:
    """What a run says of itself fits what it was asked for."""
    assert asked <= run.updates <= at_most(name, workers, asked)
    assert (run.workers, run.scheme, run.task) == (workers, name, TASK)
    assert run.servers == (shards if default(name).methods else 0)
    assert run.samples == run.gradients * run.batch
    assert run.restarts == 0
    stale = run.staleness
    assert stale.max >= stale.mean >= 0
    if default(name).asynchronous and workers > 1:
        # each of the others may push a few times while one computes, but not all the time
        assert stale.mean <= 3 * (workers - 1)
    else:
        assert stale.mean == 0


@pytest.mark.long
def test_it_learns_what_it_learns_in_virtual_time(unordered: str, tmp_path: Path) -> None:
    """Where the order of pushes is chance; else the next test compares bits."""
    name, workers, shards = unordered, crew(unordered), servers(unordered, 2)
    asked = 300 if getattr(default(name), "window", 1) < 10 else 150  # to be past the steep part of the curve
    asked = min(asked, int(1500 / (default(name).gradients_per_update(workers) or 1)))
    given = {"workers": workers, "steps": asked}
    real = [trained(tmp_path / str(k), TASK, name, servers=shards, seed=k, **given) for k in SEEDS]
    virtual = [simulate(TASK, name, seed=k, warn=lambda _: None, **given, **short(name)) for k in SEEDS]
    for run in real:
        check_counts(run, name, workers, asked, shards)
    gap = mean(run.metrics["accuracy"] for run in real) - mean(run.metrics["accuracy"] for run in virtual)
    assert abs(gap) <= NOISE


@pytest.mark.parametrize(("shards", "rule", "kind"), [(1, None, "float32"), (3, "adam", "float64")])
def test_where_the_order_is_fixed_it_gives_the_simulators_bits(
    name: str, shards: int, rule: str | None, kind: str, tmp_path: Path
) -> None:
    """Means and barriers fix the order of what is added up; where they do not, it is fixed with one worker."""
    workers = crew(name) if default(name).exact(crew(name)) is None else 1
    hyper = {"rule": rule, "lr": 0.01} if rule is not None and takes(name, workers, rule) else {}
    settings: dict[str, Any] = {"workers": workers, "steps": 20, "seed": 7, "task_options": {"dtype": kind}}
    real = trained(tmp_path / "run", TASK, name, hyper=hyper, servers=servers(name, shards), **settings)
    virtual = simulate(TASK, name, warn=lambda _: None, **settings, **short(name) | hyper)
    check_counts(real, name, workers, 20, servers(name, shards))
    assert real.digest == virtual.digest
    assert real.metrics == virtual.metrics
    # in virtual time a run ends with the chief's last update; others may still compute beside their last mean
    beside = workers * getattr(default(name), "overlap", 0)
    assert real.updates == virtual.updates
    assert real.staleness.histogram.keys() == virtual.staleness.histogram.keys()
    for staleness, count in real.staleness.histogram.items():
        assert 0 <= count - virtual.staleness.histogram[staleness] <= beside


def takes(name: str, workers: int, rule: str) -> bool:
    """Whether a scheme leaves its rule to the user, and has nothing against this one."""
    try:
        scheme_named(name, rule=rule).check(workers)
    except UsageError:
        return False
    return True


# a scheme of the user's own

PART_WAY = '''
from dataclasses import dataclass

from paceline.scheme import Rate, Scheme, on_server


@dataclass(frozen=True)
class PartWay(Scheme, name="part-way"):
    """Goes part of the way."""

    stride: Rate = 0.5

    @on_server
    def push(self, s, g):
        s.x -= 0.1 * self.stride * g
        s.v += 1
        return s.x

    async def step(self, w):
        w.x = await self.push(await w.grad(w.x))
'''


@dataclass(frozen=True)
class Stride(Scheme, name="stride"):
    """Goes part of the way, and tells the server how far with a number and a tuple."""

    stride: Rate = 0.5

    def server(self, x0: Vector, workers: int) -> State:
        return State(x=x0, pushes=0)

    @on_server
    def push(self, s: State, g: Vector, stride: float, who: tuple[int, str]) -> tuple[Vector, int]:
        s.x -= 0.1 * stride * g
        s.v += 1
        s.pushes += who[0] + 1
        return s.x, s.pushes

    async def step(self, w: Worker) -> None:
        g = await w.grad(w.x)
        w.x, pushes = await self.push(g, self.stride, (w.rank, "worker"))
        assert pushes > 0


@pytest.mark.parametrize("shards", [1, 2])
def test_a_users_scheme_as_an_object(shards: int, tmp_path: Path) -> None:
    real = trained(tmp_path / "run", TASK, Stride(stride=0.25), workers=1, servers=shards, steps=20)
    virtual = simulate(TASK, Stride(stride=0.25), workers=1, steps=20)
    assert real.digest == virtual.digest
    assert real.hyper == {"stride": 0.25}
    several = trained(tmp_path / "more", TASK, Stride, workers=3, servers=shards, steps=30)
    assert (several.scheme, several.updates, several.hyper) == ("stride", 30, {"stride": 0.5})


def test_a_users_scheme_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(PART_WAY, encoding="utf-8")
    named = f"{file}:PartWay"
    real = trained(tmp_path / "run", TASK, named, workers=1, servers=2, steps=20, hyper={"stride": "0.25"})
    assert real.digest == simulate(TASK, named, workers=1, steps=20, stride=0.25).digest
    assert (real.scheme, real.hyper) == ("part-way", {"stride": 0.25})
