"""Goodput under a storm: every few seconds a random role of the run is killed with SIGKILL.

Each scheme also trains in peace, half the time before and half after, because the machine's speed drifts. Goodput is
how many samples per second reached the final state, as a part of what they were in peace:

    python benchmarks/storm.py --seconds 60 --every 3 --schemes async,sync
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.api.execute import execute
from paceline.config.validate import planned
from paceline.processes.supervisor.status import RoleStatus, Status
from paceline.result import Result
from paceline.runs.run_directory import RunDirectory

SCHEMES = "async,sync,allreduce,downpour,aeasgd,hogwild"


@dataclass
class Storm:
    """Kills a random role at random moments, `every` seconds apart on average, and measures who stands still."""

    every: float  # 0: never
    seed: int
    kills: int = 0
    standstill: float = 0.0  # the longest of a worker that was not itself killed
    absence: float = 0.0  # the longest from a worker's death to its next step
    _due: float = 0.0
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)  # worker -> its step, and since when
    _dead: dict[str, tuple[int, int]] = field(default_factory=dict)  # worker -> its pid and step when it was killed

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def __call__(self, status: Status) -> None:
        now = time.monotonic()
        workers = [role for role in status.roles if role.name.startswith(("chief", "worker"))]
        for role in workers:
            self._look_at(role, now)
        if not self.every or any(not role.step for role in workers) or any(r.state == "done" for r in status.roles):
            return
        if not self._due:
            self._due = now + self._gap()
        elif now >= self._due:
            self._due = now + self._gap()
            role = self._random.choice(status.roles)
            if role in workers:
                self._dead[role.name] = (role.pid, role.step)
            self.kills += 1
            with suppress(ProcessLookupError):
                os.kill(role.pid, signal.SIGKILL)

    def _gap(self) -> float:
        return self.every * (0.5 + self._random.random())

    def _look_at(self, role: RoleStatus, now: float) -> None:
        step, since = self._seen.get(role.name, (0, now))
        pid, at = self._dead.get(role.name, (0, 0))
        if step and role.step == step:
            return
        if step and role.state not in ("ending", "done"):
            if not pid:
                self.standstill = max(self.standstill, now - since)
            elif role.pid != pid and role.step != at:
                self.absence = max(self.absence, now - since)
                del self._dead[role.name]
        self._seen[role.name] = (role.step, now)


def train(task: str, scheme: str, storm: Storm, folder: Path, **settings: Any) -> Result:
    plan, chosen, objects = planned(task, scheme, checkpoint_seconds=5.0, **settings)
    place = RunDirectory.create(folder, "run")
    plan = dataclasses.replace(plan, directory=str(place.path), title=scheme)
    place.write_plan(dataclasses.asdict(plan))
    return execute(plan, chosen, objects, tell=lambda _, text: None, watch=storm)


def useful(result: Result) -> float:
    """Samples per second whose gradients are in the final state: what came too late or was rolled back is not."""
    return (result.samples - result.dropped * result.batch) / result.wall_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two kills, on average")
    parser.add_argument("--schemes", default=SCHEMES, help="names with commas between them")
    parser.add_argument("--task", default="mnist-mlp")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: then the state is in memory of the GPU")
    given = parser.parse_args()
    table = Table(
        title=f"{given.task} on {given.device}, {given.workers} workers, a kill every {given.every:g} s "
        f"for {given.seconds:g} s"
    )
    for column in ("scheme", "samples/s in peace", "in the storm", "goodput", "kills", "restarts"):
        table.add_column(column, justify="left" if column == "scheme" else "right")
    for column in ("updates", "rolled back", "longest standstill", "longest absence", "accuracy"):
        table.add_column(column, justify="right")
    for scheme in given.schemes.split(","):
        settings = {"workers": given.workers, "servers": given.servers, "seconds": given.seconds, "seed": given.seed}
        settings |= {"device": given.device}
        half = settings | {"seconds": given.seconds / 2}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            before = train(given.task, scheme, Storm(0.0, given.seed), folder / "before", **half)
            storm = Storm(given.every, given.seed)
            result = train(given.task, scheme, storm, folder / "storm", **settings)
            after = train(given.task, scheme, Storm(0.0, given.seed), folder / "after", **half)
        peace = (useful(before) + useful(after)) / 2
        table.add_row(
            scheme,
            f"{peace:,.0f}",
            f"{useful(result):,.0f}",
            f"{useful(result) / peace:.0%}",
            f"{storm.kills}",
            f"{result.restarts}",
            f"{result.updates:,}",
            f"{result.rolled_back_updates:,}",
            f"{storm.standstill:.2f} s",
            f"{storm.absence:.2f} s",
            f"{result.metrics.get('accuracy', float('nan')):.3f}",
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
