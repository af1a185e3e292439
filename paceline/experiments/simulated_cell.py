"""Performs a cell in the simulator. It evaluates at equal distances: curves of several seeds can be averaged."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from paceline.api.simulate import simulate
from paceline.errors import LossError, RunError
from paceline.experiments import activity
from paceline.experiments.arms import SchemeArgument
from paceline.experiments.cells import DIVERGED, DONE, FAILED, CellOutcome, Moment, RunCell
from paceline.experiments.length import Goal
from paceline.result import Result
from paceline.simulator.engine import SimulationEngine
from paceline.task import Task

ENDLESS = 2**40  # updates of a run that something else ends
Advance = Callable[[float], None]


class Observer:
    """Evaluates a simulated run at its points, and ends it at its target. It is called after every update.

    `counted`: the run ends by its number of updates; if not, it is ended here, by its samples.
    """

    def __init__(self, cell: RunCell, start: dict[str, float], advance: Advance, *, counted: bool) -> None:
        self._cell, self._advance, self._counted = cell, advance, counted
        self._whole: float = cell.samples if cell.samples is not None else cell.seconds or math.inf
        self._next = 1
        self._target = None if cell.target is None else Goal(*cell.target)
        self.moments = [Moment(0, 0, 0.0, start)]

    def __call__(self, engine: SimulationEngine) -> None:
        done = engine.samples if self._cell.samples is not None else engine.now
        if done >= self._whole * self._next / self._cell.points:
            self._next = math.floor(done * self._cell.points / self._whole) + 1
            self.take(engine)
            self._advance(min(done / self._whole, 1.0))
        if self._cell.samples is not None and not self._counted and done >= self._whole:
            engine.stopped = f"{engine.samples:,} samples"

    def take(self, engine: SimulationEngine) -> None:
        metrics = engine.evaluate()
        self.moments.append(Moment(engine.updates, engine.samples, engine.now, metrics))
        if self._target is not None and self._target.reached(metrics):
            engine.stopped = f"{self._target} reached"

    def finish(self, result: Result) -> None:
        """Add the end of the run, unless the last evaluation was there."""
        assert result.virtual_seconds is not None
        if result.metrics and self.moments[-1].update != result.updates:
            self.moments.append(Moment(result.updates, result.samples, result.virtual_seconds, result.metrics))


def performed(
    cell: RunCell, task: str | Task, scheme: SchemeArgument, start: dict[str, float], advance: Advance, counted: bool
) -> CellOutcome:
    """Simulate the cell. `start`: the metrics of the start; `counted`: its samples can be converted to updates."""
    observer = Observer(cell, start, advance, counted=counted)
    timeline = activity.recorder(cell.workers)
    length: dict[str, Any] = {"samples": cell.samples} if counted and cell.samples is not None else {"steps": ENDLESS}
    if cell.seconds is not None:
        length["seconds"] = cell.seconds
    notes: list[str] = []
    given: dict[str, Any] = {
        "workers": cell.workers,
        "seed": cell.seed,
        "warn": notes.append,
        "say": lambda _: None,
        "watch": observer,
        "trace": timeline,
        "task_options": cell.task_options,
    }
    status, reason = DONE, ""
    try:
        result = simulate(task, scheme, **given, **cell.settings, **length, **cell.hyper)
    except RunError as error:
        status, reason = DIVERGED if isinstance(error, LossError) else FAILED, str(error)
        if error.result is None:
            return CellOutcome(status, observer.moments, reason, notes=notes)
        result = error.result
    observer.finish(result)
    if status == DONE and not all(math.isfinite(value) for value in result.metrics.values()):
        status, reason = DIVERGED, "a metric of the end is not a finite number"
    found = outcome_of(result, observer.moments, status, reason or result.stopped or "", notes)
    return dataclasses.replace(found, activity=activity.of_simulation(timeline))


def outcome_of(result: Result, moments: list[Moment], status: str, reason: str, notes: list[str]) -> CellOutcome:
    """The outcome of a run that has a result."""
    seconds = result.virtual_seconds if result.virtual_seconds is not None else result.wall_seconds
    return CellOutcome(
        status,
        moments,
        reason,
        updates=result.updates,
        gradients=result.gradients,
        samples=result.samples,
        seconds=seconds or 0.0,
        bytes_sent=None if result.traffic is None else sum(result.traffic["sent"]),
        staleness=result.staleness.histogram,
        hyper=result.as_dict()["hyper"],
        notes=notes,
    )
