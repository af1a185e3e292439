"""The same bits on a real model: one digest for any number of workers and servers, killed or not; real runs repeated.

python benchmarks/bits.py --task mnist-cnn --steps 60
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import tempfile
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from paceline import replay, simulate
from paceline.api.execute import execute
from paceline.config import build
from paceline.config.validate import planned
from paceline.processes.supervisor.status import Status
from paceline.result import Result
from paceline.runs.run_directory import RunDirectory
from paceline.task import Task

EXACT = ("sync", "allreduce", "averaging window=2")
RECORDED = ("async", "sync", "allreduce", "downpour window=2", "aeasgd window=2", "groups size=2")


class Killer:
    """Kills one role after another, each a few updates after the last one is back."""

    def __init__(self, names: list[str], every: int) -> None:
        self._names, self._every, self._next = names, every, every

    def __call__(self, status: Status) -> None:
        if self._names and status.updates >= self._next and all(role.state != "starting" for role in status.roles):
            pids = {role.name: role.pid for role in status.roles}
            with suppress(ProcessLookupError):
                os.kill(pids[self._names.pop(0)], signal.SIGKILL)
            self._next = status.updates + self._every


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--task", default="mnist-cnn")
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--batch", type=int, default=64)
    given = options.parse_args()
    torch.set_num_threads(1)
    task = build.task_of(given.task, {}).configured(batch=given.batch)
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        console.print(exact(task, given.steps, Path(folder)))
        console.print(recorded(task, given.steps, Path(folder)))


def exact(task: Task, steps: int, folder: Path) -> Table:
    found = Table("scheme", "runs", "digests", "as simulated", "restarts", "rolled back", title="--exact, micro 4")
    for words in EXACT:
        name, *pairs = words.split()
        hyper: dict[str, Any] = dict(build.pairs(pairs))
        virtual = simulate(task, name, workers=1, steps=steps, exact=True, micro=4, **hyper)
        runs = []
        cases = product((1, 2, 3, 4), (1, 2) if name == "sync" else (1,), (False, True))
        for number, (workers, servers, kill) in enumerate(cases):
            victims = (
                ["worker:1" if workers > 1 else "chief", "server:0" if name == "sync" else "chief"] if kill else []
            )
            settings = {"workers": workers, "servers": servers, "exact": True, "micro": 4, "checkpoint_steps": 10}
            place = folder / f"{name}-{number}"
            runs.append(run(task, name, hyper, place, steps, Killer(victims, steps // 4), **settings))
            print(f"{words} workers={workers} servers={servers} kill={kill}: {runs[-1].digest[:16]}", file=sys.stderr)
        digests = {one.digest for one in runs}
        sums = (str(sum(getattr(one, what) or 0 for one in runs)) for what in ("restarts", "rolled_back_updates"))
        found.add_row(words, str(len(runs)), str(len(digests)), "yes" if digests == {virtual.digest} else "NO", *sums)
    return found


def recorded(task: Task, steps: int, folder: Path) -> Table:
    found = Table("scheme", "workers", "restarts", "gradients repeated", "checkpoints", "match", title="replay")
    for words in RECORDED:
        name, *pairs = words.split()
        workers, place = 4 if name == "groups" else 3, folder / f"recorded-{name}"
        victims = ["worker:1", "chief"] if name == "allreduce" else ["worker:1", "server:0", "chief"]
        killer = Killer(victims, steps // 6)
        result = run(task, name, build.pairs(pairs), place, steps, killer, workers=workers, checkpoint_steps=steps // 4)
        told = replay(place, task=task)
        match = "yes" if told.match else str(told.difference)
        found.add_row(words, str(workers), str(result.restarts), str(told.gradients), str(len(told.checkpoints)), match)
        print(f"{words}: {match}", file=sys.stderr, flush=True)
    return found


def run(
    task: Task, name: str, hyper: dict[str, Any], place: Path, steps: int, watch: Killer, **settings: Any
) -> Result:
    plan, scheme, objects = planned(task, name, hyper=hyper, steps=steps, **settings)
    directory = RunDirectory.create(place, "bits")
    plan = dataclasses.replace(plan, directory=str(directory.path))
    return execute(plan, scheme, objects, tell=lambda *_: None, watch=watch)


if __name__ == "__main__":
    main()
