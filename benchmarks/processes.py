"""What keeping pace costs in real processes: each scheme's samples per second as a share of the limit.

The limit is as many independent processes that never talk, measured before and after every scheme in the same run,
because the machine's speed drifts. Beside paceline's schemes: torch DDP over Gloo, and torch's shared-memory HogWild.

    python benchmarks/processes.py --rounds 5 --seconds 3
"""

from __future__ import annotations

import argparse
import json
import statistics

import torch
from peers import PEERS, Shares, contenders, share_rounds, workload
from rich.console import Console
from rich.table import Table

TASK, BATCH = "mnist-mlp", 100
OTHERS = ("torch DDP (Gloo)", "torch HogWild")
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


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--servers", type=int, default=1)
    options.add_argument("--seconds", type=float, default=3.0)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--schemes", nargs="*", default=list(SCHEMES))
    options.add_argument("--without-others", action="store_true", help="omit torch DDP and torch HogWild")
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    torch.set_num_threads(1)
    work, found = workload(TASK, BATCH), Shares()
    peers = {} if given.without_others else {name: PEERS[name] for name in OTHERS}
    runs = contenders(work, given.schemes, peers, given.workers, given.servers, given.seconds)
    share_rounds(work, runs, given.workers, given.seconds, given.rounds, found)
    if given.json:
        shares = {name: statistics.median(each) for name, each in found.shares.items()}
        print(json.dumps({"limit": found.limit, "shares": shares}))
        return
    Console().print(table(found.shares, found.limit, given.workers))


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


if __name__ == "__main__":
    main()
