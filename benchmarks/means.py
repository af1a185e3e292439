"""How long a mean over workers takes: in shared memory, over our own connections, by Gloo as we use it, and by torch's
own all-reduce over Gloo.

Every worker is a process; the vector is its own, and no gradient is computed. The smallest median of a few rounds, in
milliseconds:

    python benchmarks/means.py --workers 2,4 --sizes 4,400,4000,40000
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from paceline.api.execute import execute
from paceline.config.endpoint import Certificates, Endpoint
from paceline.config.validate import planned
from paceline.network.secure import tls
from paceline.processes.supervisor.supervisor import Supervisor
from paceline.runs.run_directory import RunDirectory
from paceline.scheme import Scheme, State, Vector
from paceline.task import Batch, Task
from paceline.worker import Worker

WARM = 5


class Vectors(Task):
    """Nothing to learn: a vector of some length."""

    name, batch = "vectors", 1

    def __init__(self, length: int) -> None:
        self._length = length

    def start(self, seed: int) -> Vector:
        return torch.randn(self._length, generator=torch.Generator().manual_seed(seed))

    def batches(self, rank: int, workers: int, seed: int, first: int = 0) -> Iterator[Batch]:
        return iter(())

    def grad(
        self, x: Vector, batch: Batch, out: Vector | None = None, buffers: Mapping[str, Tensor] | None = None
    ) -> tuple[float, Vector]:
        raise NotImplementedError

    def evaluate(self, x: Vector, buffers: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        return {"loss": 0.0}


@dataclass(frozen=True)
class Timed(Scheme, name="timed"):
    """Nothing but means, each of them timed."""

    file: str = ""

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0)

    async def step(self, w: Worker) -> None:
        began = time.perf_counter()
        mean = await w.mean(w.x)
        spent = time.perf_counter() - began
        w.x = mean
        w.v += 1
        if w.rank == 0:
            with Path(self.file).open("a") as file:
                file.write(f"{spent}\n")


def ours(
    collective: str, workers: int, kilobytes: int, steps: int, folder: Path, certificates: Certificates | None = None
) -> float:
    """The median time of a mean in a run."""
    file = folder / f"{collective}-{workers}-{kilobytes}{'-tls' if certificates is not None else ''}"
    plan, scheme, objects = planned(
        Vectors(kilobytes * 250),
        Timed(file=str(file)),
        workers=workers,
        steps=steps,
        collective=collective,
        summaries=False,
        record=False,
        checkpoint_seconds=3600.0,
    )
    place = RunDirectory.create(folder / f"run-{file.name}", "benchmark")
    plan = dataclasses.replace(plan, directory=str(place.path))

    def launcher(*given: Any, **more: Any) -> Supervisor:
        return Supervisor(*given, node=Endpoint(certificates=certificates), **more)

    execute(plan, scheme, objects, tell=lambda *_: None, watch=lambda _: None, launcher=launcher)
    return 1000 * statistics.median(map(float, file.read_text().split()[WARM:]))


def torchs(workers: int, kilobytes: int, steps: int, folder: Path) -> float:
    """The median time of all_reduce and a division, over Gloo."""
    file, store = folder / f"torch-{workers}-{kilobytes}", folder / f"store-{workers}-{kilobytes}"
    children = []
    for rank in range(workers):
        child = os.fork()
        if not child:
            try:
                _reduce(rank, workers, kilobytes, steps, file, store)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    return 1000 * statistics.median(json.loads(file.read_text())[WARM:])


def _reduce(rank: int, workers: int, kilobytes: int, steps: int, file: Path, store: Path) -> None:
    torch.set_num_threads(1)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=60)
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    group = gloo(dist.FileStore(str(store), workers), rank, workers, options)
    vector, times = torch.randn(kilobytes * 250), []
    for _ in range(steps):
        mine = vector.clone()  # as a mean leaves its vector alone
        began = time.perf_counter()
        group.allreduce([mine]).wait()
        mine /= workers
        times.append(time.perf_counter() - began)
    if rank == 0:
        file.write_text(json.dumps(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--sizes", default="4,400,4000,40000", help="in thousands of bytes")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    table = Table("workers", "kB", "shared", "tcp", "tcp, TLS", "gloo", "torch's all_reduce", title="a mean, ms")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        certificates = tls.generated(folder)
        for workers in map(int, given.workers.split(",")):
            for kilobytes in map(int, given.sizes.split(",")):
                steps = WARM + max(10, min(200, 200_000 // kilobytes))
                figures = []
                for number in range(given.rounds):  # one after the other: the machine's speed drifts
                    place = folder / f"{number}"
                    place.mkdir(exist_ok=True)
                    figures.append(
                        (
                            ours("shared", workers, kilobytes, steps, place),
                            ours("tcp", workers, kilobytes, steps, place),
                            ours("tcp", workers, kilobytes, steps, place, certificates),
                            ours("gloo", workers, kilobytes, steps, place),
                            torchs(workers, kilobytes, steps, place),
                        )
                    )
                best = (f"{min(column):.2f}" for column in zip(*figures, strict=True))
                table.add_row(str(workers), f"{kilobytes:,}", *best)
    Console().print(table)


if __name__ == "__main__":
    main()
