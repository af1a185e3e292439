"""`make bench`: paceline beside the same training by other means, on this machine, in under 15 minutes.

Contenders run in turn, several rounds. Their speeds are given as shares of the limit, which is as many processes that
never communicate, measured with each of them. Engines that are not installed are skipped by name. JSON and figure
go to benchmarks/results/, the tables to docs/benchmarks.md.

    python benchmarks/bench.py                  measure, then write figure and page
    python benchmarks/bench.py --only-page      write figure and page from the JSON files
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported

import torch
from bench_page import RESULTS, write_page
from engines import ENGINES, reason_to_skip
from peers import PEERS, Shares, Speed, contenders, share_rounds, workload

from paceline import __version__

SCHEMES = ("allreduce", "sync", "async", "hogwild", "agn window=10", "averaging window=10")
SECONDS = {"mnist-mlp": 2.0, "mnist-cnn": 3.0, "wide-mlp": 3.0}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--scale", type=float, default=1.0, help="times the usual seconds of a measurement")
    options.add_argument("--tasks", nargs="+", choices=SECONDS, default=list(SECONDS))
    options.add_argument("--schemes", nargs="*", default=list(SCHEMES))
    options.add_argument("--peers", nargs="*", choices=[*PEERS, *ENGINES], default=[*PEERS, *ENGINES])
    options.add_argument("--out", type=Path, default=RESULTS / "bench.json")
    options.add_argument("--only-page", action="store_true", help="measure nothing")
    given = options.parse_args()
    if not given.only_page:
        measure(given)
    if given.out == RESULTS / "bench.json":
        print(f"written: {', '.join(map(str, write_page()))}")


def measure(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    began = time.monotonic()
    found = {name: Shares() for name in given.tasks}
    works = {name: workload(name) for name in given.tasks}
    skipped = {name: why for name in ENGINES if name in given.peers and (why := reason_to_skip(name))}
    peers = {name: play for name, play in PEERS.items() if name in given.peers}
    engines = {name: play for name, play in ENGINES.items() if name in given.peers and name not in skipped}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for number in range(given.rounds):
        for name, work in works.items():
            seconds = SECONDS[name] * given.scale
            runs = contenders(work, given.schemes, peers, given.workers, 1, seconds)
            for engine, play in engines.items():
                runs[engine] = lambda play=play, work=work, seconds=seconds: Speed(play(work, given.workers, seconds))
            print(f"round {number + 1} of {given.rounds}", file=sys.stderr)
            share_rounds(work, runs, given.workers, seconds, 1, found[name])
        told = {
            "date": time.strftime("%Y-%m-%d"),
            "minutes": round((time.monotonic() - began) / 60, 1),
            "rounds": number + 1,
            "workers": given.workers,
            "machine": machine(),
            "skipped": skipped,
            "tasks": {name: about(name, works[name], found[name], given.workers) for name in given.tasks},
        }
        given.out.write_text(json.dumps(told, indent=1) + "\n")


def about(name: str, work: Any, shares: Shares, workers: int) -> dict[str, Any]:
    length = len(work.task.start(0))
    gradient = workers * work.task.batch / shares.limit * 1000
    facts = {"parameters": length, "batch": work.task.batch, "gradient_ms": round(gradient, 2)}
    return facts | shares.as_dict()


def machine() -> dict[str, Any]:
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = int(Path("/proc/meminfo").read_text().split()[1]) / 2**20
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "paceline": __version__,
    }


if __name__ == "__main__":
    main()
