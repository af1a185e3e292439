"""A process that performs cells, one after the other: cells come as JSON lines on stdin, news go out on a pipe.

The outcome is written to the cell's file here, so that a comparison that is killed loses only what was under way.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from paceline import signals
from paceline.api.train import RunInterrupted
from paceline.config import build, work
from paceline.errors import PacelineError
from paceline.experiments import real_cell, simulated_cell
from paceline.experiments.arms import SchemeArgument
from paceline.experiments.cells import FAILED, CellOutcome, RunCell
from paceline.processes.parent_death import die_with_parent
from paceline.processes.supervisor import pickled_objects
from paceline.task import Task

EVERY = 0.2  # seconds between two news of progress


class CellProcess:
    """Performs cells. `objects`: the task and the schemes of the caller that have no name."""

    def __init__(self, directory: Path, objects: dict[str, Any], news: int) -> None:
        self._directory, self._objects, self._news = directory, objects, news
        self._task: Task | None = None
        self._start: dict[int, dict[str, float]] = {}
        self._told = 0.0

    def tell(self, **message: Any) -> None:
        os.write(self._news, (json.dumps(message) + "\n").encode())

    def perform(self, cell: RunCell) -> None:
        outcome = self._outcome(cell)
        outcome.write(cell.file(self._directory))
        self.tell(done=cell.key, status=outcome.status)

    def _outcome(self, cell: RunCell) -> CellOutcome:
        scheme: SchemeArgument = self._objects.get("schemes", {}).get(cell.label, cell.scheme)
        try:
            start = self.start(cell)
            updates = updates_of(cell, scheme, self.task(cell))
            if cell.real:
                task = self._objects.get("task", cell.task)
                return real_cell.performed(cell, task, scheme, start, self._advance, self._directory, updates)
            plain = dataclasses.replace(cell, task_options={})
            return simulated_cell.performed(
                plain, self.task(cell), scheme, start, self._advance, counted=updates is not None
            )
        except PacelineError as error:  # it concerns this cell: the others may work
            return CellOutcome(FAILED, [], str(error))
        except Exception as error:  # of the task or the scheme, which are the user's own code
            traceback.print_exc()
            return CellOutcome(FAILED, [], f"{type(error).__name__}: {error}")

    def task(self, cell: RunCell) -> Task:
        """The task, loaded once; all cells of a comparison have the same."""
        if self._task is None:
            self._task = build.task_of(self._objects.get("task", cell.task), cell.task_options).configured(
                batch=cell.settings.get("batch"), feed=cell.settings.get("feed")
            )
        return self._task

    def start(self, cell: RunCell) -> dict[str, float]:
        """The metrics of the parameters that a run begins with."""
        if cell.seed not in self._start:
            task = self.task(cell)
            self._start[cell.seed] = task.evaluate(task.start(cell.seed), task.buffers() or None)
        return self._start[cell.seed]

    def _advance(self, share: float) -> None:
        now = time.monotonic()
        if now - self._told >= EVERY:
            self._told = now
            self.tell(share=round(share, 4))


def updates_of(cell: RunCell, scheme: SchemeArgument, task: Task) -> int | None:
    """The updates that the samples of a cell are; None if it ends by time, or if the scheme cannot say."""
    if cell.samples is None:
        return None
    chosen = build.scheme_of(scheme, cell.hyper)
    crew = cell.workers
    if cell.settings.get("exact"):
        crew = cell.settings.get("micro") or 8
    if chosen.gradients_per_update(crew) is None:
        if cell.real:
            work.samples_per_update(chosen, crew, task.batch, task.feed)  # raises, and says what to do
        return None
    return work.in_updates(chosen, crew, task.batch, task.feed, task.epoch_size, samples=cell.samples)


def main() -> int:
    """The body of the process. Arguments: the descriptors of news and objects, the caller, the directory."""
    news, descriptor, caller, directory = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    die_with_parent(signal.SIGTERM, caller)
    signals.raise_while_working()
    signals.part_with("")
    try:
        process = CellProcess(directory, pickled_objects.unpacked(descriptor), news)
        for line in sys.stdin:
            told = json.loads(line)
            if told["target"] is not None:
                told["target"] = tuple(told["target"])
            process.perform(RunCell(**told))
    except (KeyboardInterrupt, RunInterrupted, signals.Interrupted, BrokenPipeError):
        return signals.EXIT_CODE
    return 0
