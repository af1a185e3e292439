"""Memory of the processes of a worker with `--inside ddp:K` and `fsdp:K`.

    python benchmarks/inside.py [--layers 8] [--width 1024] [--processes 2] [--steps 6]

A multilayer perceptron is trained by one worker with `averaging`. For each process of the worker: the median and the
maximum of its private memory (Private_Clean + Private_Dirty of /proc/PID/smaps_rollup: what would be free without the
process), which is read several times a second. The vectors of the run are in shared memory and in none of the figures.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import paceline

PRIVATE = re.compile(r"^Private_(?:Clean|Dirty):\s+(\d+) kB", re.MULTILINE)
CHIEF = "paceline role chief"
TITLE = re.compile(rf"{CHIEF}|paceline inside \S+ \d+")


class Sampler:
    """Notes the private memory of each process, by its title."""

    def __init__(self) -> None:
        self.seen: dict[str, list[float]] = defaultdict(list)

    def shown(self, title: str) -> str:
        """Median and maximum."""
        seen = self.seen[title]
        return f"{statistics.median(seen):,.0f} / {max(seen):,.0f}" if seen else "?"

    def __call__(self, _: Any) -> None:
        for place in Path("/proc").glob("[0-9]*"):
            try:
                found = TITLE.match((place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
                if found:
                    used = sum(map(int, PRIVATE.findall((place / "smaps_rollup").read_text())))
                    self.seen[found[0]].append(used / 1024)
            except OSError:
                continue  # it has ended


def task(layers: int, width: int) -> paceline.TorchTask:
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    drawn = torch.Generator().manual_seed(0)
    x, y = torch.randn(256, width, generator=drawn), torch.randint(0, 10, (256,), generator=drawn)
    return paceline.TorchTask(nn.Sequential(*parts, nn.Linear(width, 10)), nn.functional.cross_entropy, (x, y))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--width", type=int, default=1024)
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--steps", type=int, default=6)
    given = options.parse_args()
    model = task(given.layers, given.width)
    size = 4 * len(model.start(0)) / 2**20
    table = Table(title=f"private memory in MiB; the model has {size:,.0f} MiB", title_justify="left")
    for column in ("inside", "first process", "the others"):
        table.add_column(column, justify="left" if column == "inside" else "right")
    for inside in ("", f"ddp:{given.processes}", f"fsdp:{given.processes}"):
        seen = Sampler()
        with tempfile.TemporaryDirectory() as folder:
            settings = {"inside": inside} if inside else {}
            place = Path(folder) / "run"
            paceline.train(
                model, "averaging", workers=1, steps=given.steps, window=2, watch=seen, directory=place, **settings
            )
        first, *others = [*sorted(seen.seen, key=lambda title: (title != CHIEF, title))]
        table.add_row(inside or "without", seen.shown(first), ", ".join(map(seen.shown, others)))
    Console().print(table)


if __name__ == "__main__":
    main()
