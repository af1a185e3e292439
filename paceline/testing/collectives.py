"""Checks that every collective must pass.

    from paceline.testing import collectives

    @pytest.mark.parametrize("check", collectives.CHECKS, ids=lambda check: check.__name__)
    def test_my_collective(check, tmp_path):
        check("my-collective", tmp_path)

A collective is checked in real runs, which find it by its name: it must be a file of `paceline/collectives/`, or an
entry point of `paceline.collectives`. Every check trains in processes of this machine, in a directory that it is given.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.api.execute import execute
from paceline.api.simulate import simulate
from paceline.config import discovery
from paceline.config.validate import planned
from paceline.errors import SchemeError
from paceline.hook import Hook, Session
from paceline.result import Result
from paceline.runs.replay.replay import replay
from paceline.runs.run_directory import RunDirectory
from paceline.scheme import Scheme
from paceline.state import State, Vector
from paceline.worker import Worker

STEPS = 40
DEATH = 20  # the step in which a worker dies
TASK = {"noise": 0.5, "heterogeneity": 1.0}  # every worker's gradients differ
LARGE = TASK | {"dim": 300_000}  # more bytes than members exchange as small vectors

Check = Callable[[str, Path], None]


@dataclass
class DiesOnce(Hook):
    """Kills its worker before a step: the others wait for it at a mean that it does not arrive at."""

    mark: Path
    rank: int

    def before_step(self, session: Session) -> None:
        if session.worker.rank == self.rank and session.worker.t == DEATH and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Overlap(Scheme, name="conformance-overlap"):
    """Means of two lengths in a step, with unequal weights; one is under way while the gradient is computed."""

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, few=torch.zeros(3))

    async def step(self, w: Worker) -> None:
        under_way = await w.start(w.mean(w.few + w.rank, weight=1.0 + w.rank))
        g = await w.grad(w.x)
        w.few = await under_way
        g = await w.mean(g, weight=1.0 + w.rank % 2)
        w.x -= 0.1 * g
        w.v += 1


@dataclass(frozen=True)
class DiesArrived(Scheme, name="conformance-dies-arrived"):
    """A worker is killed once when it has arrived at a mean and not left it. `mark`: the file that says that it was."""

    rank: int = 0
    mark: str = ""

    async def step(self, w: Worker) -> None:
        g = await w.grad(w.x)
        under_way = await w.start(w.mean(g))
        if w.rank == self.rank and w.t == DEATH and not Path(self.mark).exists():
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        g = await under_way
        w.x -= 0.1 * g
        w.v += 1


@dataclass(frozen=True)
class Pairs(Scheme, name="conformance-pairs"):
    """Every worker takes a mean with every other one in turn, two at a time, and then with all: no worker is a step
    ahead of the others when the run ends."""

    async def step(self, w: Worker) -> None:
        g = await w.grad(w.x)
        for turn in range(1, w.workers):
            other = w.rank ^ turn
            w.x = await w.mean(w.x, among=(min(w.rank, other), max(w.rank, other)))
        g = await w.mean(g)
        w.x -= 0.1 * g
        w.v += 1


@dataclass(frozen=True)
class Unequal(Scheme, name="conformance-unequal"):
    """Worker 1 brings a longer vector than the others, from its third step on."""

    async def step(self, w: Worker) -> None:
        await w.mean(torch.ones(100 if w.rank == 1 and w.t >= 2 else 10))
        g = await w.grad(w.x)
        g = await w.mean(g)
        w.x -= 0.1 * g
        w.v += 1


def _trained(
    collective: str, directory: Path, scheme: Any, hyper: dict[str, Any] | None = None, **settings: Any
) -> Result:
    device = discovery.collective(collective).device
    usual = {"steps": STEPS, "summaries": False, "device": device, "collective": collective, "task_options": TASK}
    plan, chosen, objects = planned("quadratic", scheme, hyper=hyper or {}, **(usual | settings))
    home = RunDirectory.create(directory, "run")
    plan = replace(plan, directory=str(home.path), title="conformance")
    home.write_plan(asdict(replace(plan, hooks=[])))
    return execute(plan, chosen, objects, tell=lambda *_: None, watch=lambda _: None)


def _same_as_simulated(
    collective: str, directory: Path, scheme: Any, workers: int, hyper: dict[str, Any] | None = None, **settings: Any
) -> None:
    real = _trained(collective, directory, scheme, hyper, workers=workers, **settings)
    expected = simulate(
        "quadratic", scheme, workers=workers, steps=STEPS, **({"task_options": TASK} | settings), **(hyper or {})
    )
    assert real.updates == STEPS
    assert real.digest == expected.digest, f"{real.scheme} of {workers} workers has other bits than the simulator"


def runs_have_the_bits_of_the_simulator(collective: str, directory: Path) -> None:
    _same_as_simulated(collective, directory / "one", "allreduce", 1)
    _same_as_simulated(collective, directory / "three", "allreduce", 3, {"rule": "adam", "lr": 0.01})
    _same_as_simulated(collective, directory / "averaging", "averaging", 4, {"window": 3})
    _same_as_simulated(collective, directory / "groups", "groups", 3, {"size": 3})


def large_vectors_have_the_bits_of_the_simulator(collective: str, directory: Path) -> None:
    _same_as_simulated(collective, directory / "large", "allreduce", 3, task_options=LARGE)


def lengths_weights_and_overlap_in_one_step(collective: str, directory: Path) -> None:
    _same_as_simulated(collective, directory / "overlap", Overlap(), 3)


def groups_of_workers_take_means_of_their_own(collective: str, directory: Path) -> None:
    _same_as_simulated(collective, directory / "pairs", Pairs(), 4)


def vectors_of_different_lengths_are_refused(collective: str, directory: Path) -> None:
    error = None
    try:
        _trained(collective, directory / "unequal", Unequal(), workers=3)
    except SchemeError as raised:
        error = raised
    assert "different lengths" in str(error), error


def _after_a_death(collective: str, directory: Path, rank: int, quorum: str, arrived: bool) -> None:
    """The run ends with all its updates, and its replay, by the order log, has its bits."""
    mark = directory / "died"
    directory.mkdir()
    if arrived:
        settings: dict[str, Any] = {"hyper": {"rank": rank, "mark": str(mark)}}
        scheme = f"{__name__}:{DiesArrived.__name__}"
    else:
        settings, scheme = {"hooks": [DiesOnce(mark, rank)]}, "allreduce"
    result = _trained(collective, directory / "run", scheme, workers=3, quorum=quorum, **settings)
    where = f"{scheme}, worker {rank} of {quorum}"
    assert mark.exists(), f"no worker died: {where}"
    assert (result.updates, result.restarts) == (STEPS, 1), where
    told = replay(directory / "run")
    assert told.match, f"{where}: {told.difference}"
    assert told.digest == result.digest, where


def a_death_before_arrival_counts_for_nobody(collective: str, directory: Path) -> None:
    _after_a_death(collective, directory / "shrink", 1, "shrink", arrived=False)
    _after_a_death(collective, directory / "hold", 0, "hold", arrived=False)


def a_death_after_arrival_counts_for_all_or_nobody(collective: str, directory: Path) -> None:
    _after_a_death(collective, directory / "shrink", 2, "shrink", arrived=True)
    _after_a_death(collective, directory / "hold", 1, "hold", arrived=True)


def an_exact_run_keeps_its_bits_through_a_death(collective: str, directory: Path) -> None:
    def digest(name: str, workers: int, **settings: Any) -> str | None:
        exact = {"exact": True, "batch": 4, "micro": 4, "checkpoint_steps": 10} | settings
        return _trained(collective, directory / name, "allreduce", workers=workers, **exact).digest

    undisturbed = digest("one", 1)
    assert digest("two", 2, hooks=[DiesOnce(directory / "died", 1)]) == undisturbed
    assert (directory / "died").exists()


CHECKS: tuple[Check, ...] = (
    runs_have_the_bits_of_the_simulator,
    large_vectors_have_the_bits_of_the_simulator,
    lengths_weights_and_overlap_in_one_step,
    groups_of_workers_take_means_of_their_own,
    vectors_of_different_lengths_are_refused,
    a_death_before_arrival_counts_for_nobody,
    a_death_after_arrival_counts_for_all_or_nobody,
    an_exact_run_keeps_its_bits_through_a_death,
)
