"""How long a mean in shared memory takes, against a bare prototype in the same run.

Workers compute for a while, each in its own process, then take the mean of a vector that is already in shared memory,
as a gradient is. The prototype has no faults, groups or weights: each process reduces a slice of all vectors between
two barriers at which it spins, then copies the sum. Both are measured in turn. Figures are the smallest medians of all
rounds, in milliseconds, as worker 0 sees them: waiting for the slowest worker included.

    python benchmarks/shared_means.py --workers 2,8,14 --sizes 4,400,4000
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import torch
from means import Vectors
from torch import Tensor

from paceline.api.execute import execute
from paceline.config.validate import planned
from paceline.runs.run_directory import RunDirectory
from paceline.scheme import Scheme, State, Vector
from paceline.task import Batch
from paceline.worker import Worker

WARM = 20  # means before the clock starts
LINE = 8  # words of a cache line

_times: list[float] = []  # of this process


def compute(seconds: float) -> None:
    until, some = time.perf_counter() + seconds, torch.ones(32, 32)
    while time.perf_counter() < until:
        some @ some


class Computing(Vectors):
    """Gradients that take a certain time."""

    name = "computing"

    def __init__(self, length: int, seconds: float) -> None:
        super().__init__(length)
        self._seconds = seconds

    def batches(self, rank: int, workers: int, seed: int, first: int = 0) -> Iterator[Batch]:
        return repeat(Batch((), 1))

    def grad(
        self, x: Vector, batch: Batch, out: Vector | None = None, buffers: Mapping[str, Tensor] | None = None
    ) -> tuple[float, Vector]:
        assert out is not None
        compute(self._seconds)
        return 0.0, out.fill_(1.0)


@dataclass(frozen=True)
class Timed(Scheme, name="timed-shared"):
    """Gradients and their means, each mean timed."""

    file: str = ""
    means: int = 0

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0)

    async def step(self, w: Worker) -> None:
        g = await w.grad(w.x)
        began = time.perf_counter()
        g = await w.mean(g)
        _times.append(time.perf_counter() - began)
        w.x = g
        w.v += 1
        if w.rank == 0 and len(_times) == self.means:
            Path(self.file).write_text(json.dumps(_times))


def ours(workers: int, kilobytes: int, means: int, seconds: float, folder: Path) -> float:
    """The median time of a mean in a run of paceline, ms."""
    file = folder / "times"
    plan, scheme, objects = planned(
        Computing(kilobytes * 250, seconds),
        Timed(file=str(file), means=means),
        workers=workers,
        steps=means,
        summaries=False,
        checkpoint_seconds=3600.0,
    )
    place = RunDirectory.create(folder / "run", "benchmark")
    plan = dataclasses.replace(plan, directory=str(place.path))
    execute(plan, scheme, objects, tell=lambda *_: None, watch=lambda _: None)
    return median(file)


def bare(workers: int, kilobytes: int, means: int, seconds: float, folder: Path) -> float:
    """The median time of the prototype's, ms."""
    file, length = folder / "bare", kilobytes * 250
    words = 2 * workers * LINE * 8
    memory = mmap.mmap(-1, words + (workers + 1) * length * 4)
    vectors = torch.frombuffer(memory, dtype=torch.float32, offset=words).view(workers + 1, length)
    children = []
    for rank in range(workers):
        child = os.fork()
        if not child:
            try:
                times = _prototype(rank, workers, means, seconds, memoryview(memory).cast("q"), vectors)
                if rank == 0:
                    file.write_text(json.dumps(times))
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    return median(file)


def _prototype(rank: int, workers: int, means: int, seconds: float, words: memoryview, vectors: Tensor) -> list[float]:
    torch.set_num_threads(1)
    mine, total, length = vectors[rank], vectors[workers], vectors.shape[1]
    low, high = length * rank // workers, length * (rank + 1) // workers
    parts, out = [vectors[other, low:high] for other in range(workers)], vectors[workers, low:high]
    times = []

    def barrier(which: int, number: int) -> None:
        words[(2 * rank + which) * LINE] = number
        for other in range(workers):
            at = (2 * other + which) * LINE
            while words[at] < number:
                os.sched_yield()

    for number in range(1, means + 1):
        compute(seconds)
        mine.fill_(1.0)
        began = time.perf_counter()
        barrier(0, number)
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out += part
        out /= workers
        barrier(1, number)
        result = total.clone()
        times.append(time.perf_counter() - began)
        del result
    return times


def median(file: Path) -> float:
    return 1000 * statistics.median(json.loads(file.read_text())[WARM:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="2,8,14")
    parser.add_argument("--sizes", default="4,400,4000", help="in thousands of bytes")
    parser.add_argument("--compute", type=float, default=1.0, help="ms between two means")
    parser.add_argument("--means", type=int, default=300, help="per round")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for workers in map(int, given.workers.split(",")):
        for kilobytes in map(int, given.sizes.split(",")):
            figures: dict[str, list[float]] = {"shared_ms": [], "bare_ms": []}
            for _ in range(given.rounds):
                with tempfile.TemporaryDirectory() as name:
                    asked = (workers, kilobytes, WARM + given.means, given.compute / 1000, Path(name))
                    figures["shared_ms"].append(ours(*asked))
                    figures["bare_ms"].append(bare(*asked))
            best = {name: round(min(found), 4) for name, found in figures.items()}
            ratio = round(best["shared_ms"] / best["bare_ms"], 2)
            print(json.dumps({"workers": workers, "kB": kilobytes, **best, "ratio": ratio}))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
