"""What the order log costs: each scheme's samples per second with it, as a share of the same run without.

The two are run in turn, many times for a short while, because the machine's speed drifts; the share is that of the
medians. Processor time per gradient is compared too: who else uses the cores disturbs it less. Beside them: the bytes
that the log takes per update.

    python benchmarks/record.py --rounds 10 --seconds 2
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from processes import BATCH, TASK
from rich.console import Console
from rich.table import Table

from paceline.api.execute import execute
from paceline.config import build
from paceline.config.validate import planned
from paceline.runs.run_directory import RunDirectory
from paceline.task import Task

SCHEMES = ("async", "sync", "allreduce", "agn window=10", "averaging window=10")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--seconds", type=float, default=2.0)
    options.add_argument("--schemes", nargs="*", default=list(SCHEMES))
    given = options.parse_args()
    torch.set_num_threads(1)
    task = build.task_of(TASK, {}).configured(batch=BATCH)
    found = Table(title=f"{TASK}, batch {BATCH}, 2 workers", title_justify="left")
    for name in ("scheme", "speed with the log / without", "processor time per gradient", "bytes per update"):
        found.add_column(name, justify="left" if name == "scheme" else "right")
    for words in given.schemes:
        speeds: dict[bool, list[float]] = {True: [], False: []}
        costs: dict[bool, list[float]] = {True: [], False: []}
        sizes = []
        for number in range(given.rounds):
            for record in (number % 2 == 0, number % 2 == 1):
                speed, cost, size = trained(task, words, given.seconds, record=record)
                speeds[record].append(speed)
                costs[record].append(cost)
                sizes += [size] if record else []
        share, cost = (statistics.median(one[True]) / statistics.median(one[False]) for one in (speeds, costs))
        print(f"{words}: {share:.4f}, {cost:.4f}", file=sys.stderr, flush=True)
        found.add_row(words, f"{share:.3f}", f"{cost:.3f}", f"{statistics.median(sizes):.0f}")
    Console().print(found)


def trained(task: Task, words: str, seconds: float, *, record: bool) -> tuple[float, float, float]:
    """Samples per second, processor seconds per gradient, and the bytes of its log per update."""
    name, *pairs = words.split()
    plan, scheme, objects = planned(
        task, name, hyper=build.pairs(pairs), workers=2, seconds=seconds, steps=None, record=record
    )
    with tempfile.TemporaryDirectory() as folder:
        place = RunDirectory.create(Path(folder) / "run", "benchmark")
        plan = dataclasses.replace(plan, directory=str(place.path), batch=BATCH)
        before = used()
        result = execute(plan, scheme, objects, tell=lambda *_: None, watch=lambda _: None)
        spent = used() - before
        size = sum(log.stat().st_size for log in place.path.glob("order/*/*.log"))
    assert result.samples_per_second is not None
    return result.samples_per_second, spent / result.gradients, size / max(result.updates, 1)


def used() -> float:
    """Processor seconds of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
