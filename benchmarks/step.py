"""What a worker's session costs a gradient: real runs of one worker against the same loop by hand.

    python benchmarks/step.py                    # a gradient that is free: Python alone
    python benchmarks/step.py --task mnist-mlp   # a real one: the session's code is out of the core's caches after it
    python benchmarks/step.py --cold 8           # every gradient reads 8 MB: the session is out of the caches
    python benchmarks/step.py --parts            # beside it, which part of the session takes how long (processor time)

Blocks of 20 gradients of the session alternate with blocks of the same loop by hand (batch, gradient, x - lr * g) in
the same process: machines are noisier than the difference. Medians over blocks, then over rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import mmap
import os
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from paceline.api.execute import execute
from paceline.config import build
from paceline.config.validate import planned
from paceline.processes.calls.client import CallClient
from paceline.processes.roles.checkpointing import Checkpointing
from paceline.processes.roles.recorder import RunLog
from paceline.processes.roles.train_loop import BatchSupply, GradientBuffers
from paceline.processes.roles.waiting import StepOperations
from paceline.processes.roles.worker_cells import WorkerCells
from paceline.processes.roles.worker_session import WorkerSession
from paceline.rules import Rule
from paceline.runs.order_log import OrderLogWriter
from paceline.runs.run_directory import RunDirectory
from paceline.runtime.hook_calls import HookCalls
from paceline.runtime.step_driver import StepDriver
from paceline.task import Batch, Task

SCHEMES = ("sgd", "allreduce", "averaging window=10", "hogwild", "async", "agn window=10", "downpour window=10")
WARM = 200  # gradients before the clock starts
BLOCK = 20  # gradients between two looks at the clocks: a multiple of the windows
PARTS: list[tuple[type, str]] = [
    (WorkerSession, "give"),
    (WorkerSession, "_between"),
    (WorkerSession, "_end_step"),
    (StepDriver, "begin"),
    (StepDriver, "advance"),
    (Rule, "apply"),
    (StepOperations, "perform"),
    (CallClient, "carry_on"),
    (OrderLogWriter, "record"),
    (RunLog, "step"),
    (Checkpointing, "between_steps"),
    (WorkerCells, "begin_step"),
    (WorkerCells, "end_step"),
    (HookCalls, "before_step"),
    (HookCalls, "after_step"),
    (GradientBuffers, "free"),
    (BatchSupply, "next"),
]
ROOM = mmap.mmap(-1, 4096)  # inherited by the worker, which is forked
# gradients; processor time and time of one by hand, and of one in the session; of each part calls and time
FIGURES = struct.Struct(f"<{5 + 2 * len(PARTS)}d")


class Free(Task):
    """A gradient that costs nothing."""

    name = "free"

    def __init__(self, size: int) -> None:
        self.size, self._batch = size, Batch((), 1)

    def start(self, seed: int) -> Tensor:
        return torch.zeros(self.size)

    def batches(self, rank: int, workers: int, seed: int, first: int = 0) -> Iterator[Batch]:
        return repeat(self._batch)

    def grad(self, x: Tensor, batch: Batch, out: Tensor | None = None, buffers: Any = None) -> tuple[float, Tensor]:
        assert out is not None
        return 0.0, out

    def evaluate(self, x: Tensor, buffers: Any = None) -> dict[str, float]:
        return {"loss": 0.0}


class Clock:
    """Times a worker's gradients in blocks, each followed by a block of the same loop by hand in the same process."""

    def __init__(self, task: Task, limit: int, cold: int) -> None:
        self._task, self._limit, self._count = task, limit, 0
        self._grad = _cooled(task.grad, cold) if cold else task.grad
        self._mine: list[tuple[int, int]] = []
        self._hand: list[tuple[int, int]] = []
        self._began = 0, 0
        self.parts = [[0, 0] for _ in PARTS]
        task.grad = self.grad  # type: ignore[method-assign]

    def grad(self, x: Tensor, batch: Batch, out: Tensor | None = None, buffers: Any = None) -> tuple[float, Tensor]:
        count = self._count
        self._count += 1
        if count >= WARM and count % BLOCK == 0:
            self._look(x, buffers)
        return self._grad(x, batch, out, buffers)

    def _look(self, x: Tensor, buffers: Any) -> None:
        if self._count > WARM + 1:
            self._mine.append(_since(self._began))
            if self._count > self._limit:
                if self._count <= self._limit + BLOCK:
                    self._write()
                return
        else:
            self._x, self._out = x.clone(), torch.empty_like(x)
            self._batches = self._task.batches(0, 1, 1)
            for part in self.parts:
                part[:] = 0, 0
        began = _now()
        for _ in range(BLOCK):
            self._grad(self._x, next(self._batches), self._out, buffers)
            self._x.add_(self._out, alpha=-0.1)
        self._hand.append(_since(began))
        self._began = _now()

    def _write(self) -> None:
        hand, mine = (
            [statistics.median(one) / BLOCK for one in zip(*rows, strict=True)] for rows in (self._hand, self._mine)
        )
        flat = [number for part in self.parts for number in part]
        FIGURES.pack_into(ROOM, 0, len(self._mine) * BLOCK, *hand, *mine, *flat)

    def watch(self) -> None:
        """Time the parts of the session. That costs about 0.5 µs a call, counted in the parts around it."""
        for (home, name), figures in zip(PARTS, self.parts, strict=True):
            setattr(home, name, _timed(getattr(home, name), figures))


def _now() -> tuple[int, int]:
    return time.thread_time_ns(), time.perf_counter_ns()


def _since(began: tuple[int, int]) -> tuple[int, int]:
    return time.thread_time_ns() - began[0], time.perf_counter_ns() - began[1]


def _cooled(grad: Callable[..., Any], megabytes: int) -> Callable[..., Any]:
    """A gradient that reads so much memory that nothing else is left in the core's own caches. The loop by hand does
    the same: it costs both alike."""
    room = torch.ones(megabytes << 17, dtype=torch.int64)

    def cooled(*args: Any) -> Any:
        result = grad(*args)
        room.sum()
        return result

    return cooled


def _timed(function: Callable[..., Any], figures: list[int]) -> Callable[..., Any]:
    clock = time.thread_time_ns

    def timed(*args: Any, **given: Any) -> Any:
        began = clock()
        try:
            return function(*args, **given)
        finally:
            figures[0] += 1
            figures[1] += clock() - began

    return timed


def task_of(name: str, size: int, batch: int) -> Task:
    return Free(size) if name == "free" else build.task_of(name, {}).configured(batch=batch)


def in_child(work: Callable[[], None]) -> tuple[float, ...]:
    """Do some work in a process of its own, and give the figures that a clock has written there."""
    FIGURES.pack_into(ROOM, 0, *[0.0] * (5 + 2 * len(PARTS)))
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    figures = FIGURES.unpack_from(ROOM)
    if status or not figures[0]:
        raise SystemExit("a run failed")
    return figures


def in_paceline(make: Callable[[], Task], words: str, limit: int, *, cold: int, parts: bool, record: bool) -> None:
    torch.set_num_threads(1)
    task = make()
    clock = Clock(task, limit, cold)
    if parts:
        clock.watch()
    name, *pairs = words.split()
    window = int(dict(pair.split("=") for pair in pairs).get("window", 1))
    plan, scheme, objects = planned(
        task, name, hyper=build.pairs(pairs), workers=1, servers=1, steps=-(-(limit + 2 * BLOCK) // window)
    )
    with tempfile.TemporaryDirectory() as folder:
        place = RunDirectory.create(Path(folder) / "run", "benchmark")
        plan = dataclasses.replace(plan, directory=str(place.path), record=record and plan.record)
        execute(plan, scheme, objects, tell=lambda *_: None, watch=lambda _: None)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--task", default="free", help="free, or the name of a task")
    options.add_argument("--size", type=int, default=1000, help="numbers in the vector of the free task")
    options.add_argument("--batch", type=int, default=100)
    options.add_argument("--gradients", type=int, default=0, help="default: 10,000, or 1,500 of a task or cold")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--schemes", nargs="*", default=list(SCHEMES))
    options.add_argument("--cold", type=int, default=0, metavar="MB", help="read so much memory in every gradient")
    options.add_argument("--parts", action="store_true", help="how long each part of the session takes")
    options.add_argument("--no-record", action="store_true", help="without order logs")
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    limit = WARM + (given.gradients or (1_500 if given.cold or given.task != "free" else 10_000))
    if given.task != "free":
        build.task_of(given.task, {})  # the data are read once, before any fork

    def make() -> Task:
        return task_of(given.task, given.size, given.batch)

    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in given.schemes}
    for _ in range(given.rounds):
        for name in given.schemes:
            found[name].append(
                in_child(
                    lambda name=name: in_paceline(  # type: ignore[misc]
                        make, name, limit, cold=given.cold, parts=given.parts, record=not given.no_record
                    )
                )
            )
    rows = {name: _row(figures) for name, figures in found.items()}
    if given.json:
        print(json.dumps({"task": given.task, "gradients": limit - WARM, "rows": rows}))
        return
    table = Table(title=f"{given.task}: µs a gradient, one worker", title_justify="left")
    for column in ("", "by hand", "session", "extra", "extra, processor", "share of by hand"):
        table.add_column(column, justify="right" if column else "left")
    for name, row in rows.items():
        cells = (f"{row['hand']:.1f}", f"{row['time']:.1f}", f"{row['extra']:+.1f}", f"{row['extra_cpu']:+.1f}")
        table.add_row(name, *cells, f"{row['share']:.3f}")
    console = Console()
    console.print(table)
    if given.parts:
        table = Table(title="µs a gradient inside each part (calls a gradient)", title_justify="left")
        table.add_column("")
        for name in given.schemes:
            table.add_column(name.replace(" window=", ", "), justify="right")
        for number, (home, part) in enumerate(PARTS):
            cells = []
            for name in given.schemes:
                calls = statistics.median(one[5 + 2 * number] / one[0] for one in found[name])
                spent = statistics.median(one[6 + 2 * number] / one[0] for one in found[name]) / 1e3
                cells.append(f"{spent:.1f} ({calls:.1f})" if calls else "")
            table.add_row(f"{home.__name__}.{part}", *cells)
        console.print(table)


def _row(rounds: list[tuple[float, ...]]) -> dict[str, float]:
    def median(of: Callable[[tuple[float, ...]], float]) -> float:
        return statistics.median(of(one) for one in rounds)

    return {
        "hand": median(lambda one: one[2] / 1e3),
        "time": median(lambda one: one[4] / 1e3),
        "extra": median(lambda one: (one[4] - one[2]) / 1e3),
        "extra_cpu": median(lambda one: (one[3] - one[1]) / 1e3),
        "share": median(lambda one: one[2] / one[4]),
    }


if __name__ == "__main__":
    main()
