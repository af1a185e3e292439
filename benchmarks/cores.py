"""Many cores: each scheme's samples per second as a share of the limit, for several numbers of workers.

The limit is as many processes that never communicate, measured with every row (`peers.py`). mnist-mlp, batch 100, one
thread in each process, one server; beside paceline's schemes torch DDP over Gloo and torch's shared-memory HogWild.
GPUs are hidden from all processes.

    python benchmarks/cores.py --workers 2 8 14 --seconds 2 --rounds 1 --out cores.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported

import torch
from peers import PEERS, WINDOW, Shares, contenders, share_rounds, workload
from rich.console import Console
from rich.table import Table

SCHEMES = ("allreduce", "async", "sync", "hogwild", "agn window=10", "averaging window=10")
OTHERS = ("torch DDP (Gloo)", "torch HogWild")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    usual = [2, 8, 14] if cores >= 16 else [count for count in (2, 4, 8, 14) if count <= cores] or [1]
    options.add_argument("--workers", type=int, nargs="+", default=usual)
    options.add_argument("--servers", type=int, default=1)
    options.add_argument("--seconds", type=float, default=2.0, help="of every measurement")
    options.add_argument("--rounds", type=int, default=1)
    options.add_argument("--task", default="mnist-mlp", help="mnist-mlp, mnist-cnn or wide-mlp")
    options.add_argument("--batch", type=int)
    options.add_argument("--schemes", nargs="*", default=list(SCHEMES))
    options.add_argument("--others", nargs="*", choices=list(PEERS), default=list(OTHERS))
    options.add_argument("--out", type=Path, help="a JSON file, written after every number of workers")
    given = options.parse_args()
    torch.set_num_threads(1)
    work = workload(given.task, given.batch)
    peers = {name: PEERS[name] for name in given.others}
    found: dict[int, Shares] = {}
    for workers in given.workers:
        found[workers] = Shares()
        barriers = (1, WINDOW) if workers > 1 else ()
        runs = contenders(work, given.schemes, peers, workers, given.servers, given.seconds, barriers)
        share_rounds(work, runs, workers, given.seconds, given.rounds, found[workers])
        text = json.dumps(report(found, work.name, work.task.batch, cores))
        if given.out is not None:
            given.out.write_text(text + "\n")
    print(text)
    Console(file=sys.stderr, width=100).print(table(found, f"{work.name}, batch {work.task.batch}, {cores} cores"))


def report(found: dict[int, Shares], name: str, batch: int, cores: int) -> dict[str, Any]:
    rows = {str(workers): shares.as_dict() for workers, shares in found.items()}
    date = time.strftime("%Y-%m-%d")
    return {"task": name, "batch": batch, "cores": cores, "date": date, "torch": torch.__version__, "workers": rows}


def table(found: dict[int, Shares], title: str) -> Table:
    shown = Table(title=f"{title}; share of the limit", title_justify="left")
    shown.add_column("scheme")
    for workers in found:
        shown.add_column(f"{workers} workers", justify="right")
    shown.add_row("limit, samples/s", *(f"{shares.limit:,.0f}" for shares in found.values()))
    for name in next(iter(found.values())).shares:
        shown.add_row(name, *(f"{statistics.median(shares.shares[name]):.2f}" for shares in found.values()))
    return shown


if __name__ == "__main__":
    main()
