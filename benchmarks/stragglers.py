"""What waiting for the slowest worker costs by itself: the floor of every scheme with a barrier.

As many processes as workers compute gradients of mnist-mlp, each on its own copy of the parameters. Rows are shares of
the limit, which is the speed of these processes when they never wait for each other:

    expected   computed from the times of the limit: each window lasts as long as the slowest worker's
    spin       a bare barrier after every window; who waits spins, and calls sched_yield between two looks
    busy       the same without sched_yield
    nap N      the same, but sleeps N microseconds between two looks
    paceline   `averaging` with this window, `allreduce` for a window of 1

No vector is exchanged except by paceline. So `spin` is what a mean without any cost would reach on this machine.

    python benchmarks/stragglers.py --workers 2 8 14 --windows 1 10 --seconds 2
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported

import torch
from peers import LR, Workload, paced, workload

LINE = 8  # words of a cache line
Look = Callable[[], None]  # what a process does between two looks at the others


def trial(work: Workload, workers: int, window: int, seconds: float, look: Look | None) -> list[list[float]]:
    """Of each worker the times of its gradients, in seconds. `look` None: they never wait for each other."""
    gradients = max(window, int(seconds / work.gradient / 2)) // window * window + work.warm // window * window
    words = memoryview(mmap.mmap(-1, workers * LINE * 8)).cast("q")
    times = mmap.mmap(-1, 8 * workers * gradients)
    found = torch.frombuffer(times, dtype=torch.float64).view(workers, gradients)
    children = []
    for rank in range(workers):
        child = os.fork()
        if not child:
            try:
                _worker(work, rank, workers, window, look, words, found)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    return [row[work.warm // window * window :].tolist() for row in found]


def _worker(
    work: Workload, rank: int, workers: int, window: int, look: Look | None, words: memoryview, found: torch.Tensor
) -> None:
    torch.set_num_threads(1)
    x, mine = work.task.start(0), found[rank].numpy()
    out, batches = torch.empty_like(x), work.task.batches(rank, workers, 0)
    _meet(words, rank, workers, 1, os.sched_yield)  # all begin together
    with torch.no_grad():
        for number in range(len(mine)):
            began = time.perf_counter()
            work.task.grad(x, next(batches), out)
            x.add_(out, alpha=-LR)
            if look is not None and (number + 1) % window == 0:
                _meet(words, rank, workers, 2 + number, look)
            mine[number] = time.perf_counter() - began
    words[rank * LINE] = 1 << 62


def _meet(words: memoryview, rank: int, workers: int, number: int, look: Look) -> None:
    words[rank * LINE] = number
    for other in range(workers):
        while words[other * LINE] < number:
            look()


def rate(times: list[list[float]]) -> float:
    """Gradients per second of all workers together."""
    return sum(len(each) / sum(each) for each in times)


def expected(times: list[list[float]], window: int) -> float:
    """Gradients per second if every window lasted as long as that of the slowest worker."""
    sums = [[sum(each[k : k + window]) for k in range(0, len(each), window)] for each in times]
    slowest = [max(column) for column in zip(*sums, strict=True)]
    return len(times) * window * len(slowest) / sum(slowest)


def spread(times: list[list[float]]) -> dict[str, Any]:
    """Milliseconds of a gradient: of all workers together, and of the fastest and the slowest worker by its mean."""
    flat = sorted(1000 * one for each in times for one in each)
    means = [1000 * statistics.mean(each) for each in times]
    at = {name: round(flat[int(share * (len(flat) - 1))], 3) for name, share in (("p50", 0.5), ("p99", 0.99))}
    return at | {"max": round(flat[-1], 3), "worker_means": [round(min(means), 3), round(max(means), 3)]}


def nap(microseconds: int) -> Look:
    return lambda: time.sleep(microseconds * 1e-6)


def measured(work: Workload, workers: int, window: int, seconds: float, looks: dict[str, Look]) -> dict[str, Any]:
    """One row: every run between two measurements of the limit."""
    alone = trial(work, workers, window, seconds, None)
    before = rate(alone)
    row: dict[str, Any] = {"workers": workers, "window": window, "gradient_ms": spread(alone)}
    row["expected"] = round(expected(alone, window) / before, 3)
    for name in [*looks, "paceline"]:
        if name == "paceline":
            scheme = "allreduce" if window == 1 else f"averaging window={window}"
            found = paced(work, scheme, workers, 0, seconds)
            row[name] = round(found.run / (found.limit or 1.0), 3)
            continue
        speed = rate(trial(work, workers, window, seconds, looks[name]))
        after = rate(trial(work, workers, window, seconds, None))
        row[name] = round(2 * speed / (before + after), 3)
        before = after
    return row


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--workers", type=int, nargs="+", default=[2, 8, 14])
    options.add_argument("--windows", type=int, nargs="+", default=[1, 10])
    options.add_argument("--seconds", type=float, default=2.0, help="of every measurement, about")
    options.add_argument("--naps", type=int, nargs="*", default=[50], help="microseconds")
    given = options.parse_args()
    torch.set_num_threads(1)
    looks: dict[str, Look] = {"spin": os.sched_yield, "busy": lambda: None}
    looks |= {f"nap {length}": nap(length) for length in given.naps}
    work = workload("mnist-mlp")
    for workers in given.workers:
        for window in given.windows:
            print(json.dumps(measured(work, workers, window, given.seconds, looks)))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
