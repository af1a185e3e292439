"""What an update of a big vector costs on the CPU: block by block with 1 to 16 threads, against the arithmetic of
torch.optim on the whole vector with one thread. Prints JSON: ms, medians over rounds, and whether the bits are equal.

    python benchmarks/updates.py [--megabytes 4 40 340] [--threads 1 2 4 8 16] [--rounds 5]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from paceline.processes.roles import spare_cores
from paceline.rules import SGD, Adam, Momentum, Rule, blocks
from paceline.state import State

RULES: dict[str, Rule] = {"sgd": SGD(), "momentum": Momentum(), "adam": Adam()}
LR = 0.01


def whole(name: str, state: State, g: Tensor) -> None:
    """The update as torch.optim makes it: every operation on the whole vector."""
    plain: dict[str, Any] = {"lr": LR, "weight_decay": 0.0, "maximize": False, "foreach": False}
    if name == "adam":
        cells = ([state.cell(f"adam_{cell}")] for cell in ("mean", "square"))
        given: Any = ([state.x], [g], *cells, [], [state.cell("adam_step")])
        adam(*given, amsgrad=False, beta1=0.9, beta2=0.999, eps=1e-8, **plain)
    else:
        buffer = state.cell("momentum_buffer") if name == "momentum" else None
        momentum = 0.9 if name == "momentum" else 0.0
        sgd([state.x], [g], [buffer], momentum=momentum, dampening=0.0, nesterov=False, **plain)


def timed(update: Callable[[], None]) -> float:
    began = time.perf_counter()
    update()
    return (time.perf_counter() - began) * 1e3


def digest(state: State) -> str:
    return hashlib.blake2b(state.x.numpy().tobytes(), digest_size=8).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="*", default=[4, 40, 340])
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rules", nargs="*", default=list(RULES))
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    cores = len(os.sched_getaffinity(0))
    found: dict[str, Any] = {"cores": cores, "torch": torch.__version__, "rows": []}
    for megabytes in given.megabytes:
        count = int(megabytes * 250_000) + 1
        generator = torch.Generator().manual_seed(0)
        x, g = (torch.rand(count, generator=generator) for _ in range(2))
        for name in given.rules:
            rule = RULES[name]
            threads = [number for number in given.threads if number <= cores]
            states = [State(x=x, **rule.cells(x)) for _ in range(1 + len(threads))]
            times: list[list[float]] = [[] for _ in states]
            ways = {number: spare_cores.SpareCores(number).perform if number > 1 else None for number in threads}
            for _ in range(given.rounds + 1):
                times[0].append(timed(partial(whole, name, states[0], g)))
                for number, state, own in zip(threads, states[1:], times[1:], strict=True):
                    blocks.use(ways[number])
                    own.append(timed(partial(rule.apply, state, g, LR)))
            medians = [round(statistics.median(one[1:]), 3) for one in times]
            ours = {str(number): middle for number, middle in zip(threads, medians[1:], strict=True)}
            equal = len({digest(state) for state in states}) == 1
            found["rows"].append({"megabytes": megabytes, "rule": name, "whole": medians[0], "blocks": ours})
            found["rows"][-1]["same_bits"] = equal
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
