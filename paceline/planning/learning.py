"""How many samples a target needs: simulations with real gradients, of as many sizes as the budget allows."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paceline
from paceline.config.comparison import GRADIENTS, LIMIT
from paceline.experiments.arms import Arm
from paceline.experiments.cells import DONE, CellOutcome, RunCell
from paceline.experiments.length import Goal
from paceline.experiments.pool import CellPool
from paceline.experiments.progress import shown_progress
from paceline.fields import finite
from paceline.planning.forecast import Assumptions
from paceline.planning.laws import law_text, mean_of_law
from paceline.task import Task

SEEDS = 3
POINTS = 300  # evaluations of a run that misses the target: so finely the samples to it are known


@dataclass(frozen=True)
class Needed:
    """Samples to the target, by scheme and workers: None if it was not reached within `limit` samples. `sizes`: the
    numbers of workers that were simulated; more workers need at least as many samples, or that is assumed."""

    goal: Goal
    limit: int
    sizes: tuple[int, ...]
    samples: Mapping[tuple[str, int], float | None] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)  # why a scheme failed

    def of(self, label: str, workers: int) -> tuple[float | None, bool]:
        """The samples, and whether they were simulated; if not, those of the next smaller number of workers that
        was."""
        known = max((size for size in self.sizes if size <= workers), default=self.sizes[0])
        return self.samples.get((label, known)), workers in self.sizes


def sizes_within(budget: float, gradient: float, schemes: int, sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The numbers of workers to simulate, from the smallest on, and the batches that a run may have."""
    jobs = len(os.sched_getaffinity(0))
    longest = GRADIENTS * LIMIT
    each = schemes * SEEDS * longest * gradient / jobs  # seconds for one number of workers
    number = min(len(sizes), int(budget / each) if each > 0 else len(sizes))
    if number >= 1:
        return tuple(sizes[:number]), longest
    return tuple(sizes[:1]), max(10, int(longest * budget / each))


def needed_samples(
    goal: Goal,
    arms: Sequence[Arm],
    task: str | Task,
    built: Task,
    given: Assumptions,
    sizes: tuple[int, ...],
    batches: int,
    directory: Path,
    task_options: Mapping[str, Any],
    say: Any,
) -> Needed:
    limit = batches * given.batch
    cells = {
        (arm.label, size, seed): _cell(goal, arm, size, seed, task, built, given, limit, task_options)
        for size in sizes
        for arm in arms
        for seed in range(given.seed, given.seed + SEEDS)
    }
    found: dict[str, CellOutcome] = {}
    missing = []
    for cell in cells.values():
        outcome = CellOutcome.read(cell.file(directory))
        if outcome is None:
            missing.append(cell)
        else:
            found[cell.key] = outcome
    objects: dict[str, Any] = {"schemes": {arm.label: arm.own for arm in arms if arm.own is not None}}
    if not isinstance(task, str):
        objects["task"] = task
    with shown_progress(len(cells), str(directory), say) as progress:
        progress.skip(len(found))

        def finished(cell: RunCell, outcome: CellOutcome) -> None:
            found[cell.key] = outcome
            progress.finished(cell, outcome)

        CellPool(directory, objects, len(os.sched_getaffinity(0)), progress.watch, finished).perform(missing)
    samples: dict[tuple[str, int], float | None] = {}
    reasons: dict[str, str] = {}
    for arm in arms:
        for size in sizes:
            outcomes = [found[cells[arm.label, size, seed].key] for seed in range(given.seed, given.seed + SEEDS)]
            samples[arm.label, size] = _median(goal, outcomes)
            if failed := [one.reason for one in outcomes if one.status != DONE]:
                reasons[arm.label] = failed[0]
    return Needed(goal, limit, sizes, samples, reasons)


def _median(goal: Goal, outcomes: Sequence[CellOutcome]) -> float | None:
    """Of all seeds; a seed that misses the target counts as endless."""
    reached = [
        next((moment.samples for moment in one.moments if goal.reached(moment.metrics)), math.inf) for one in outcomes
    ]
    middle = statistics.median(reached)
    return middle if math.isfinite(middle) else None


def _cell(
    goal: Goal,
    arm: Arm,
    workers: int,
    seed: int,
    task: str | Task,
    built: Task,
    given: Assumptions,
    limit: int,
    task_options: Mapping[str, Any],
) -> RunCell:
    law = given.gradient.law if given.stragglers.factors is None else given.stragglers.factors
    pace = mean_of_law(law) / given.gradient_seconds
    speeds = [pace * speed for speed in given.stragglers.speeds(workers) or (1.0,) * workers]
    start = built.evaluate(built.start(seed), built.buffers() or None)
    return RunCell(
        label=arm.label,
        scheme=arm.scheme,
        workers=workers,
        hyper=dict(arm.hyper),
        seed=seed,
        real=False,
        samples=limit,
        seconds=None,
        target=(goal.metric, goal.value),
        points=POINTS,
        task=task if isinstance(task, str) else built.name,
        task_options=dict(task_options),
        settings={
            "batch": given.batch,
            "compute": law_text(law),
            "speeds": speeds,
            "network": f"latency={given.network.latency!r},bandwidth={given.network.bandwidth!r}",
        },
        identity={"start": finite(start), "version": paceline.__version__},
    )
