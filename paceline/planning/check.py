"""Compares forecasts with real runs on this machine, with a few workers. The network is its shared memory, so messages
cost what makes simulated runs without gradients as fast as real ones are here. Those have as many workers, which wait
for each other, need the vector in their own core's cache and share the cores, as in the run that is forecast.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from paceline.api.train import train
from paceline.compute_times import Constant
from paceline.config import build
from paceline.errors import UsageError
from paceline.planning.forecast import Assumptions, simulated
from paceline.planning.laws import SumOf, forecast_law
from paceline.planning.measure import CoreTimer, arithmetic_of
from paceline.planning.plan_cells import CheckedCell
from paceline.planning.spelling import Stragglers
from paceline.planning.timed_engine import MessageCosts
from paceline.planning.timing_task import TimingTask
from paceline.result import Result
from paceline.scheme import Scheme
from paceline.task import Task

CHECKED = ("allreduce", "sync", "async", "local-sgd")
SECONDS = 1.0  # of each real run, about; at least LEAST updates
LEAST = 10
ROUNDS = 3
ALONE = 1000  # gradients of a window in which workers do not talk to each other
SEARCH = 10  # simulations that find the cost of a message
LARGEST = 1 << 20  # share of a step


def checked_cells(
    given_task: str | Task,
    task: Task,
    schemes: Mapping[str, Scheme],
    given: Assumptions,
    task_options: Mapping[str, Any],
    say: Callable[[str], None],
) -> list[CheckedCell]:
    """Train with 2 workers, and with 4 where there are cores for them. The schemes of the plan that are among CHECKED
    are checked, or its first one. What is measured for the forecast and the runs take turns, and medians count: a
    machine is not equally fast at all times."""
    chosen = {label: scheme for label, scheme in schemes.items() if label in CHECKED} or dict(list(schemes.items())[:1])
    update = arithmetic_of(build.scheme_of("averaging", {}), task, "cpu", 1).worker
    found = []
    with tempfile.TemporaryDirectory() as folder:
        runs = _Runs(Path(folder), given, tuple((name, tuple(shape)) for name, shape in task.parameters()))
        for workers in (2, 4) if len(os.sched_getaffinity(0)) >= 4 else (2,):
            forecasts: dict[str, list[float]] = {label: [] for label in chosen}
            measured: dict[str, list[float]] = {label: [] for label in chosen}
            for _ in range(ROUNDS):
                gradient, mean = runs.gradient(given_task, task_options, workers) - update, runs.mean(workers)
                for label, scheme in chosen.items():
                    empty = runs.empty(scheme, workers) if scheme.methods else 0.0
                    here = _Here(gradient, mean, empty, runs.filling(workers))
                    forecasts[label].append(_forecast(label, scheme, workers, here, given))
                    steps = runs.steps(scheme, workers, forecasts[label][-1])
                    done = runs.made(given_task, scheme, workers, steps, task_options)
                    measured[label].append(done.samples_per_second or 0.0)
            for label in chosen:
                one = CheckedCell(label, workers, median(forecasts[label]), median(measured[label]) or 1e-9)
                found.append(one)
                say(f"{label}, {workers} workers: forecast {one.forecast:,.0f}, measured {one.measured:,.0f} samples/s")
    return found


@dataclass(frozen=True)
class _Here:
    """Measured on this machine, in seconds: a gradient while all workers compute; a mean; of a run of the scheme whose
    gradients only fill the vector, the time for each gradient of all workers together; that filling."""

    gradient: float
    mean: float
    empty: float
    filling: float


class _Runs:
    """Real runs in a folder that goes away."""

    def __init__(self, folder: Path, given: Assumptions, shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()) -> None:
        self._folder, self._given, self._shapes, self._number = folder, given, shapes, 0

    def made(
        self, task: str | Task, scheme: Any, workers: int, steps: int, options: Mapping[str, Any] | None = None
    ) -> Result:
        self._number += 1
        more: dict[str, Any] = {"batch": self._given.batch} if not isinstance(task, TimingTask) else {}
        return train(
            task,
            scheme,
            workers=workers,
            steps=steps,
            directory=self._folder / str(self._number),
            checkpoint_seconds=None,
            summaries=False,
            task_options=options,
            say=lambda _: None,
            watch=lambda _: None,
            **more,
        )

    def steps(self, scheme: Scheme, workers: int, rate: float) -> int:
        gradients = scheme.gradients_per_update(workers)
        if gradients is None:
            raise UsageError(f"plan: {scheme.name} does not say how many gradients an update takes; check another one")
        return max(LEAST, int(SECONDS * rate / (gradients * self._given.batch)))

    def gradient(self, task: str | Task, options: Mapping[str, Any], workers: int) -> float:
        """Seconds of a gradient and the local update while as many workers compute: they share caches and memory."""
        window = max(20, min(ALONE, int(SECONDS / self._given.gradient.mean)))
        scheme = build.scheme_of("averaging", {"window": window})
        done = self.made(task, scheme, workers, 2, options)
        return (done.wall_seconds or 0.0) * workers / done.gradients

    def mean(self, workers: int) -> float:
        """Seconds of a mean, and of all else of a step that is no gradient."""
        done = self.made(self._timing(), "allreduce", workers, self._repeats())
        return max(0.0, (done.wall_seconds or 0.0) / done.updates - self.filling(workers))

    def empty(self, scheme: Scheme, workers: int) -> float:
        """Seconds for each gradient of a run in which gradients cost next to nothing."""
        done = self.made(self._timing(), scheme, workers, self._repeats())
        return (done.wall_seconds or 0.0) / max(done.gradients, 1)

    def _timing(self) -> TimingTask:
        return TimingTask(self._given.vector_bytes // 4, shapes=self._shapes)

    def _repeats(self) -> int:
        return int(min(3000, max(30, 4e9 / max(self._given.vector_bytes, 1))))

    def filling(self, workers: int) -> float:
        """What the gradient of a TimingTask takes, where as many workers share the cores."""
        out = torch.empty(self._given.vector_bytes // 4)
        times = []
        for _ in range(20):
            watch = CoreTimer(torch.device("cpu"))
            out.fill_(0.0)
            times.append(watch.seconds())
        return sorted(times)[len(times) // 2] * max(1.0, workers / len(os.sched_getaffinity(0)))


def _forecast(label: str, scheme: Scheme, workers: int, here: _Here, given: Assumptions) -> float:
    arithmetic = given.arithmetic[label]
    # a mean and a run without gradients were measured with the arithmetic of a step; the other gradients of a window
    # have their own
    window = (scheme.gradients_per_update(workers) or 1) > workers
    law = Constant(1.0) if given.gradient.given else given.gradient.law
    times = SumOf(forecast_law(law, max(here.gradient, 1e-9), Stragglers()), 1, arithmetic.worker if window else 0.0)
    alike = replace(given, stragglers=Stragglers(), servers=1)
    costs = MessageCosts(per_call=0.0, calls=arithmetic.calls, mean=here.mean)
    if scheme.methods:
        costs = calibrated(scheme, workers, here.empty, here.filling, alike, costs)
    return simulated(scheme, workers, TimingTask(64, given.batch), times, alike, costs).samples_per_second


def calibrated(
    scheme: Scheme, workers: int, empty: float, filling: float, given: Assumptions, costs: MessageCosts
) -> MessageCosts:
    """Costs with which a simulated run takes `empty` seconds for each gradient, if a gradient itself takes `filling`.
    If calls alone take longer, they are performed faster than was measured: they cost less in proportion."""

    def seconds(tried: MessageCosts) -> float:
        law = Constant(max(filling, 1e-9))
        rate = simulated(scheme, workers, TimingTask(64), law, given, tried).samples_per_second
        return 1 / rate if rate > 0 else 0.0

    def scaled(share: float) -> MessageCosts:
        return replace(costs, per_message=0.0, calls={name: value * share for name, value in costs.calls.items()})

    def dearer(share: float) -> MessageCosts:
        return replace(costs, per_message=share * empty * workers)

    change = dearer if seconds(dearer(0.0)) < empty else scaled
    low, high = 0.0, 1.0
    while change is dearer and high < LARGEST and seconds(change(high)) < empty:  # many gradients for each exchange
        low, high = high, 2 * high
    for _ in range(SEARCH):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(change(middle)) < empty else (low, middle)
    return change((low + high) / 2)
