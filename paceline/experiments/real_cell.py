"""Performs a cell in real processes of this machine."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.api.train import reached, train
from paceline.errors import LossError, RunError
from paceline.experiments import activity
from paceline.experiments.arms import SchemeArgument
from paceline.experiments.cells import DIVERGED, DONE, FAILED, CellOutcome, Moment, RunCell
from paceline.experiments.simulated_cell import Advance, outcome_of
from paceline.processes.supervisor.status import Status
from paceline.result import Point, Result
from paceline.runs.run_directory import RunDirectory
from paceline.task import Task

RUNS = "runs"


def performed(
    cell: RunCell,
    task: str | Task,
    scheme: SchemeArgument,
    start: dict[str, float],
    advance: Advance,
    directory: Path,
    updates: int | None,
) -> CellOutcome:
    """Train the cell in a run directory within the comparison's. `updates`: those that its samples are."""
    place = directory / RUNS / cell.key
    if place.exists():  # of a cell that was interrupted: it has no outcome
        shutil.rmtree(place)
    length: dict[str, Any] = {"steps": None, "seconds": cell.seconds} if updates is None else {"samples": cell.samples}
    notes: list[str] = []

    def watch(status: Status) -> None:
        whole = updates or 0
        if whole:
            advance(min(status.updates / whole, 1.0))

    given: dict[str, Any] = {
        "workers": cell.workers,
        "seed": cell.seed,
        "hooks": list(_hooks(cell, updates)),
        "task_options": cell.task_options,
        "directory": place,
        "keep": 1,
        "summaries": False,
        "say": lambda _: None,
        "watch": watch,
    }
    status, reason = DONE, ""
    result: Result | None
    try:
        result = train(task, scheme, **given, **cell.settings, **length, **cell.hyper)
    except RunError as error:
        status, reason = DIVERGED if isinstance(error, LossError) else FAILED, str(error)
        result = error.result
    if result is None and place.exists():
        result = reached(RunDirectory.open(place))
    moments = [Moment(0, 0, 0.0, start)]
    if result is None:
        return CellOutcome(status, moments, reason, notes=notes)
    moments += _moments(result)
    if status == DONE and not all(math.isfinite(value) for value in result.metrics.values()):
        status, reason = DIVERGED, "a metric of the end is not a finite number"
    found = outcome_of(result, moments, status, reason or result.stopped or "", notes + result.warnings)
    shown = activity.of_run(RunDirectory.open(place))
    return dataclasses.replace(found, run=f"{RUNS}/{cell.key}", activity=shown)


def _hooks(cell: RunCell, updates: int | None) -> Iterable[str]:
    """When the chief evaluates: after equal numbers of updates, or at equal times."""
    every = "" if updates is None else f"every={max(1, updates // cell.points)}"
    yield f"validation:{every or f'seconds={(cell.seconds or 1.0) / cell.points:.6g}'}"
    if cell.target is not None:
        metric, value = cell.target
        yield f"target:metric={metric},value={value!r}{f',{every}' if every else ''}"


def _moments(result: Result) -> Iterable[Moment]:
    """The evaluations of the run; their samples are in proportion to the updates."""
    per_update = result.samples / max(result.updates, 1)
    wall = result.wall_seconds or 0.0
    points = sorted(result.history, key=lambda point: point.update)
    if result.metrics and (not points or points[-1].update < result.updates):
        points.append(Point(result.updates, max(wall, points[-1].seconds if points else 0.0), result.metrics))
    for point in points:
        yield Moment(point.update, round(point.update * per_update), point.seconds, point.metrics)
