"""Whole simulated runs, gradients one by one against gradients in flight computed at once: gradients per second.

`python benchmarks/batched.py` for a CPU, `python benchmarks/batched.py --device cuda` for a GPU. One line of JSON for
each case: task, scheme, compute law, workers, device, gradients per second of both, their ratio, and the mean size of a
block. The start of a run (making workers, probing the model) is not counted.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

from paceline.compute_times import parse_times
from paceline.config import build
from paceline.simulator.cost import Cost
from paceline.simulator.engine import SimulationEngine
from paceline.task import Task

CPU_CASES = ("digits-mlp:64", "digits-mlp:256", "digits-mlp:1024", "mnist-mlp:64", "mnist-mlp:256", "mnist-mlp:1024")
GPU_CASES = ("mnist-mlp:64", "mnist-mlp:256", "mnist-mlp:1024", "mnist-mlp:4096", "mnist-cnn:64", "mnist-cnn:256")


def gradients_per_second(task: Task, workers: int, asked: argparse.Namespace, *, batched: bool) -> tuple[float, float]:
    """Also the mean number of gradients in a block."""
    engine = SimulationEngine(
        task,
        build.scheme_of(asked.scheme, {"lr": 1e-5}),
        workers=workers,
        seed=0,
        cost=Cost(compute_law=parse_times(asked.compute)),
        batched=batched,
        device=torch.device(asked.device),
    )
    blocks = [0]
    if batched:
        many = engine._drawn.batched  # type: ignore[attr-defined]
        computed = many.compute

        def compute(*args: Any) -> Any:
            blocks[0] += 1
            return computed(*args)

        many.compute = compute
    # virtual seconds of one stretch, in which every worker computes about that number of gradients
    stretch = 1 if not batched else 2 if asked.device == "cpu" else 32
    engine.run(seconds=2.5)
    wait(asked.device)
    first, blocks[0], began = engine.gradients, 0, time.perf_counter()
    while time.perf_counter() - began < asked.seconds:
        engine.run(seconds=engine.now + stretch)
        wait(asked.device)
    gradients = engine.gradients - first
    return gradients / (time.perf_counter() - began), gradients / max(1, blocks[0])


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="TASK:WORKERS")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scheme", default="async")
    parser.add_argument("--compute", default="constant:1.0")
    parser.add_argument("--batch", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    for case in asked.cases or (CPU_CASES if asked.device == "cpu" else GPU_CASES):
        name, _, workers = case.partition(":")
        task = build.task_of(name, {}).configured(batch=asked.batch)
        if asked.device != "cpu":
            task = task.on(torch.device(asked.device))
        single, _ = gradients_per_second(task, int(workers), asked, batched=False)
        at_once, block = gradients_per_second(task, int(workers), asked, batched=True)
        told = {
            "task": name,
            "scheme": asked.scheme,
            "compute": asked.compute,
            "workers": int(workers),
            "batch": task.batch,
            "device": asked.device,
            "one by one": round(single, 1),
            "batched": round(at_once, 1),
            "ratio": round(at_once / single, 2),
            "block": round(block, 1),
        }
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
