"""What keeping pace costs in real processes: each scheme's samples per second as a share of the limit.

The limit is as many independent processes that never talk, measured before and after every scheme in the same run,
because the machine's speed drifts. Beside paceline's schemes: torch DDP over Gloo, and torch's shared-memory HogWild.

    python benchmarks/processes.py --rounds 5 --seconds 3
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from paceline.api.execute import execute
from paceline.config import build
from paceline.config.validate import planned
from paceline.runs.run_directory import RunDirectory
from paceline.task import Task

TASK, BATCH = "mnist-mlp", 100
SCHEMES = (
    "allreduce",
    "sync",
    "async",
    "hogwild",
    "downpour window=10",
    "agn window=10",
    "sagn window=10",
    "dynsgd window=10",
    "aeasgd window=10",
    "averaging window=10",
)
AIMS = {"allreduce": 0.8, "sync": 0.8, "async": 0.75, "hogwild": 0.85}
WARM = 100  # gradients before the clock starts


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--servers", type=int, default=1)
    options.add_argument("--seconds", type=float, default=3.0)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--schemes", nargs="*", default=list(SCHEMES))
    options.add_argument("--without-others", action="store_true", help="leave torch DDP and torch HogWild out")
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    task = build.task_of(TASK, {}).configured(batch=BATCH)
    torch.set_num_threads(1)
    rows: dict[str, list[float]] = {}
    limits = []
    runs: dict[str, Callable[[], float]] = {
        name: lambda name=name: paced(task, name, given.workers, given.servers, given.seconds)  # type: ignore[misc]
        for name in given.schemes
    }
    if not given.without_others:
        runs["torch DDP (Gloo)"] = lambda: others(_ddp, task, given.workers, given.seconds)
        runs["torch HogWild"] = lambda: others(_torch_hogwild, task, given.workers, given.seconds)
    for number in range(given.rounds):
        before = others(_alone, task, given.workers, given.seconds)
        for name, run in runs.items():
            speed = run()
            after = others(_alone, task, given.workers, given.seconds)
            rows.setdefault(name, []).append(speed / ((before + after) / 2))
            limits.append(after)
            print(f"round {number + 1}: {name}: {rows[name][-1]:.3f}", file=sys.stderr, flush=True)
            before = after
    limit = statistics.median(limits)
    if given.json:
        print(json.dumps({"limit": limit, "shares": {name: statistics.median(v) for name, v in rows.items()}}))
        return
    Console().print(table(rows, limit, given.workers))


def table(rows: dict[str, list[float]], limit: float, workers: int) -> Table:
    gradient = workers * BATCH / limit
    found = Table(title=f"{TASK}, batch {BATCH}, {workers} workers; limit {limit:,.0f} samples/s", title_justify="left")
    for name in ("scheme", "share of the limit", "least", "most", "extra per gradient", "aim"):
        found.add_column(name, justify="left" if name == "scheme" else "right")
    for name, shares in rows.items():
        middle = statistics.median(shares)
        aim = AIMS.get(name, 0.95 if "window" in name else None)
        extra = f"{(1 / middle - 1) * gradient * 1e6:.0f} µs"
        cells = (
            f"{middle:.2f}",
            f"{min(shares):.2f}",
            f"{max(shares):.2f}",
            extra,
            "" if aim is None else f"{aim:.2f}",
        )
        found.add_row(name, *cells)
    return found


def paced(task: Task, words: str, workers: int, servers: int, seconds: float) -> float:
    """Samples per second of a scheme in paceline's processes."""
    name, *pairs = words.split()
    plan, scheme, objects = planned(
        task, name, hyper=build.pairs(pairs), workers=workers, servers=servers, seconds=seconds, steps=None
    )
    with tempfile.TemporaryDirectory() as folder:
        place = RunDirectory.create(Path(folder) / "run", "benchmark")
        plan = dataclasses.replace(plan, directory=str(place.path), batch=BATCH)
        result = execute(plan, scheme, objects, tell=lambda *_: None, watch=lambda _: None)
    assert result.samples_per_second is not None
    return result.samples_per_second


def others(play: Callable[..., None], task: Task, workers: int, seconds: float) -> float:
    """Samples per second of all processes together that each run `play`."""
    context = get_context("fork")
    counts = context.Array("d", workers)
    shared: Any = None
    if play is _torch_hogwild:
        shared = _model().share_memory()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    crew = [
        context.Process(target=_begin, args=(play, task, rank, workers, seconds, counts, shared, port))
        for rank in range(workers)
    ]
    for process in crew:
        process.start()
    for process in crew:
        process.join()
        if process.exitcode:
            raise SystemExit(f"{play.__name__} failed with exit code {process.exitcode}")
    return sum(counts)


def _begin(
    play: Callable[..., None],
    task: Task,
    rank: int,
    workers: int,
    seconds: float,
    counts: Any,
    shared: Any,
    port: int,
) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    play(task, rank, workers, _clock(rank, seconds, counts), shared)


def _clock(rank: int, seconds: float, counts: Any) -> Callable[[], bool]:
    """Called after each gradient: counts those after the warm-up, and says when the time is over."""
    state = {"gradients": 0, "since": 0.0}

    def more() -> bool:
        state["gradients"] += 1
        if state["gradients"] == WARM:
            state["since"] = time.perf_counter()
        if state["gradients"] <= WARM:
            return True
        passed = time.perf_counter() - state["since"]
        counts[rank] = (state["gradients"] - WARM) * BATCH / passed
        return passed < seconds

    return more


def _alone(task: Task, rank: int, workers: int, more: Callable[[], bool], _: Any) -> None:
    x = task.start(0)
    out = torch.empty_like(x)
    batches = task.batches(rank, workers, 0)
    with torch.no_grad():
        while True:
            task.grad(x, next(batches), out)
            x.add_(out, alpha=-0.1)
            if not more():
                return


def _model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def _torch_hogwild(task: Task, rank: int, workers: int, more: Callable[[], bool], model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in task.batches(rank, workers, 0):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.data[0]), batch.data[1]).backward()
        optimizer.step()
        if not more():
            return


def _ddp(task: Task, rank: int, workers: int, more: Callable[[], bool], _: Any) -> None:
    torch.distributed.init_process_group("gloo", rank=rank, world_size=workers)
    model = nn.parallel.DistributedDataParallel(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    going = torch.ones(1)
    for step, batch in enumerate(task.batches(rank, workers, 0)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.data[0]), batch.data[1]).backward()
        optimizer.step()
        if not more():
            going.zero_()
        if step % 50 == 0:  # all must end at the same step; asking seldom costs next to nothing
            torch.distributed.all_reduce(going, op=torch.distributed.ReduceOp.MIN)
            if not going.item():
                break
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
