"""The trace of `--profile`: some steps of a worker as torch.profiler sees them, with the stopwatch's categories."""

from __future__ import annotations

import gzip
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile

from paceline.hook import Hook, Rest, Session
from paceline.processes.roles.stopwatch import Category, Stopwatch

SKIPPED, STEPS = 10, 20  # steps before the trace, and in it
LONGEST = 2.0  # seconds after which it ends with the step: every operation of torch takes room in the file
FOLDER = "profile"


def file_of(rank: int) -> str:
    """A worker's trace, in the run directory."""
    return f"{FOLDER}/worker-{rank}.trace.json.gz"


class StepTrace(Hook):
    """Traces the first steps after a warm-up. A worker that is restarted traces only if it has not before."""

    def __init__(self, stopwatch: Stopwatch, clock: Callable[[], float] = time.monotonic) -> None:
        self._stopwatch, self._clock = stopwatch, clock
        self._start = stopwatch.timed(Category.TRACE, self._start)  # type: ignore[method-assign]
        self._write = stopwatch.timed(Category.TRACE, self._write)  # type: ignore[method-assign]

    def begin(self, session: Session) -> None:
        assert session.directory is not None
        self._path = session.directory / file_of(session.worker.rank)
        self._running: Any = None
        self._due = not self._path.exists()
        self._first, self._began = session.worker.t + SKIPPED, 0.0

    def before_step(self, session: Session) -> None:
        if self._due and session.worker.t >= self._first:
            self._due, self._first = False, session.worker.t
            self._start()
            self._stopwatch.begin_ranges()

    def after_step(self, session: Session) -> None:
        if self._running is None:
            return
        if session.worker.t >= self._first + STEPS or self._clock() - self._began >= LONGEST:
            self._end(session)

    def rests(self, session: Session) -> Rest | None:
        if self._running is not None:
            return None
        return Rest(steps=self._first) if self._due else Rest()

    def end(self, session: Session) -> None:
        self._end(session)

    def _start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # or it prints lines of its own
        # the core of torch.profiler.profile, which would first import all of torch.compile: two seconds
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        # without CUPTI torch records an event around every operation, which takes longer than most of them
        used = used and torch.profiler.ProfilerActivity.CUDA in torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
        self._running = profile(use_device="cuda" if used else None)
        self._running.__enter__()
        self._began = self._clock()

    def _end(self, session: Session) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        self._stopwatch.end_ranges()
        try:
            self._write(running, self._path)
        except OSError as error:
            session.say(f"worker:{session.worker.rank} has no trace: {error}")

    def _write(self, running: Any, path: Path) -> None:
        running.__exit__(None, None, None)
        path.parent.mkdir(exist_ok=True)
        plain, packed = path.with_name(f".{path.stem}"), path.with_name(f".{path.name}")
        running.export_chrome_trace(str(plain))
        with plain.open("rb") as content, gzip.open(packed, "wb", compresslevel=5) as target:
            shutil.copyfileobj(content, target)
        plain.unlink()
        packed.replace(path)
