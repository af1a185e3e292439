"""Compares forecasts with real runs on this machine, with a few workers. The network is its shared memory, so message
costs are those that runs without gradients take here."""

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
MESSAGES = 3  # of a step of `async`: to pull, the answer, to push


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
        runs = _Runs(Path(folder), given)
        for workers in (2, 4) if len(os.sched_getaffinity(0)) >= 4 else (2,):
            forecasts: dict[str, list[float]] = {label: [] for label in chosen}
            measured: dict[str, list[float]] = {label: [] for label in chosen}
            for _ in range(ROUNDS):
                here = _Here(runs.gradient(given_task, task_options, workers) - update, runs.mean(workers), runs.call())
                for label, scheme in chosen.items():
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
    """Measured on this machine, in seconds: a gradient while all workers compute, a mean, a pull with a push."""

    gradient: float
    mean: float
    call: float


class _Runs:
    """Real runs in a folder that goes away."""

    def __init__(self, folder: Path, given: Assumptions) -> None:
        self._folder, self._given, self._number = folder, given, 0

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
        return max(0.0, (done.wall_seconds or 0.0) / done.updates - self._filling())

    def call(self) -> float:
        """The same of a step of `async` with one worker: a pull and a push."""
        done = self.made(self._timing(), "async", 1, self._repeats())
        return max(0.0, (done.wall_seconds or 0.0) / done.updates - self._filling())

    def _timing(self) -> TimingTask:
        return TimingTask(self._given.vector_bytes // 4)

    def _repeats(self) -> int:
        return int(min(3000, max(30, 4e9 / max(self._given.vector_bytes, 1))))

    def _filling(self) -> float:
        """What the gradient of a TimingTask takes."""
        out = torch.empty(self._given.vector_bytes // 4)
        times = []
        for _ in range(20):
            watch = CoreTimer(torch.device("cpu"))
            out.fill_(0.0)
            times.append(watch.seconds())
        return sorted(times)[len(times) // 2]


def _forecast(label: str, scheme: Scheme, workers: int, here: _Here, given: Assumptions) -> float:
    arithmetic = given.arithmetic[label]
    at_server = sum(arithmetic.calls.values())
    # a mean and a call were measured with the arithmetic of a step; the other gradients of a window have their own
    window = (scheme.gradients_per_update(workers) or 1) > workers
    law = Constant(1.0) if given.gradient.given else given.gradient.law
    times = SumOf(forecast_law(law, max(here.gradient, 1e-9), Stragglers()), 1, arithmetic.worker if window else 0.0)
    costs = MessageCosts(
        per_message=max(0.0, here.call - at_server) / MESSAGES, per_call=0.0, calls=arithmetic.calls, mean=here.mean
    )
    alike = replace(given, stragglers=Stragglers(), servers=1)
    return simulated(scheme, workers, TimingTask(64, given.batch), times, alike, costs).samples_per_second
