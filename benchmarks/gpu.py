"""One GPU: milliseconds per step of paceline beside a plain PyTorch loop.

Every cell is a run in processes of its own, within a time limit, through the public API. Blocks of its steps are in
turn with blocks of the plain loop in the same processes (`alternate.py`): the speed of a GPU that others use too
changes from second to second. The plain loop of several workers is as many loops at the same time that never
communicate. The JSON file is written after each cell.

    python benchmarks/gpu.py --out gpu.json
    python benchmarks/gpu.py --device cpu --tiny --seconds 2 --warm 0.5      # on any machine
    python benchmarks/gpu.py --list
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alternate import RANK, Blocks, Loop, Ranks, alternating, barrier_alone

HERE = Path(__file__).resolve().parent
GPT, VECTOR, CNN = f"{HERE / 'gpu_tasks.py'}:gpt", f"{HERE / 'gpu_tasks.py'}:vector", "mnist-cnn"
TINY: dict[str, dict[str, Any]] = {
    GPT: {"layers": 2, "width": 64, "heads": 2, "context": 16, "half": False},
    VECTOR: {"length": 100_000},
    CNN: {},
}


@dataclass(frozen=True)
class Cell:
    """A run of paceline. `scheme` None: plain loops that meet after every step and exchange nothing, which is what a
    mean without any cost would be."""

    task: str
    scheme: str | None
    workers: int = 1
    batch: int = 32
    block: int = 20  # steps between two changes: a multiple of the window
    hyper: dict[str, Any] = field(default_factory=lambda: {"lr": 0.001})


def _windowed(scheme: str, workers: int) -> Cell:
    return Cell(GPT, scheme, workers, hyper={"lr": 0.001, "window": 10})


CELLS = {
    "gpt sgd": Cell(GPT, "sgd"),
    "gpt async x1": Cell(GPT, "async"),
    "gpt agn window=10 x1": _windowed("agn", 1),
    "gpt, a barrier alone x2": Cell(GPT, None, 2),
    "gpt async x2": Cell(GPT, "async", 2),
    "gpt allreduce x2": Cell(GPT, "allreduce", 2),
    "gpt agn window=10 x2": _windowed("agn", 2),
    "gpt averaging window=10 x2": _windowed("averaging", 2),
    "vector async x1": Cell(VECTOR, "async", batch=1, block=50),
    "vector allreduce x2": Cell(VECTOR, "allreduce", 2, batch=1, block=50),
    "cnn sgd": Cell(CNN, "sgd", batch=256, block=50),
    "cnn async x1": Cell(CNN, "async", batch=256, block=50),
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), metavar="CELL")
    options.add_argument("--only", default="", help="cells whose name holds this text")
    options.add_argument("--list", action="store_true", help="print the names of the cells")
    options.add_argument("--device", default="cuda")
    options.add_argument("--tiny", action="store_true", help="models of a few thousand parameters")
    options.add_argument("--seconds", type=float, default=8.0, help="of every measurement")
    options.add_argument("--warm", type=float, default=3.0, help="seconds of training before it")
    options.add_argument("--limit", type=float, default=90.0, help="seconds after which a cell is killed")
    options.add_argument("--rounds", type=int, default=1)
    options.add_argument("--out", type=Path)
    options.add_argument("--one", choices=CELLS, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.list:
        print("\n".join(CELLS))
    elif given.one:
        print(json.dumps(measured(CELLS[given.one], given.device, given.tiny, given.seconds, given.warm)))
    else:
        measure_all(given)


def measure_all(given: argparse.Namespace) -> None:
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(given.rounds):
        for name in (one for one in given.cells if given.only in one):
            found.setdefault(name, []).append(apart(name, given))
            told = report(found, given.device)
            if given.out is not None:
                given.out.write_text(json.dumps(told, indent=1) + "\n")
            print(line(name, told["cells"][name]), flush=True)
    print(json.dumps(told))


def apart(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """A cell in a process of its own."""
    command = [sys.executable, __file__, "--one", name, "--device", given.device, *(["--tiny"] if given.tiny else [])]
    command += ["--seconds", str(given.seconds), "--warm", str(given.warm)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, errors = process.communicate(timeout=given.limit)
    except subprocess.TimeoutExpired:
        process.kill()  # the launcher of a run ends with its caller
        process.communicate()
        return {"error": f"not finished after {given.limit:g} s"}
    if process.returncode:
        return {"error": errors.strip()[-600:]}
    told: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return told


def report(found: dict[str, list[dict[str, Any]]], device: str) -> dict[str, Any]:
    """Medians over the rounds."""
    cells: dict[str, dict[str, Any]] = {}
    for name, rounds in found.items():
        whole = [one for one in rounds if "error" not in one]
        if not whole:
            cells[name] = rounds[-1]
            continue
        cells[name] = {key: round(statistics.median(one[key] for one in whole), 4) for key in whole[0]}
        cells[name]["extra_ms"] = round(cells[name]["ms_per_step"] - cells[name]["plain_ms"], 4)
        if len(whole) > 1:
            cells[name]["rounds"] = [round(one["share"], 4) for one in whole]
    told = {"device": device, "date": time.strftime("%Y-%m-%d"), "cells": cells}
    return told if device == "cpu" else {"gpu": graphics(), **told}


def graphics() -> str:
    """The GPU by its driver's name."""
    files = Path("/proc/driver/nvidia/gpus").glob("*/information")
    names = [line.partition(":")[2].strip() for file in files for line in file.read_text().splitlines()[:1]]
    return ", ".join(names) or "an unknown GPU"


def line(name: str, cell: dict[str, Any]) -> str:
    if "error" in cell:
        return f"{name:28} failed: {cell['error']}"
    return (
        f"{name:28} {cell['ms_per_step']:8.3f} ms, plain {cell['plain_ms']:8.3f} ms: share {cell['share']:.3f} "
        f"({cell['least']:.3f} to {cell['most']:.3f}), extra {cell['extra_ms']:.3f} ms"
    )


# in the process of a cell


def measured(cell: Cell, device: str, tiny: bool, seconds: float, warm: float) -> dict[str, Any]:
    if cell.scheme is None:
        return meeting(cell, device, tiny, seconds, warm)
    began = time.monotonic()
    from paceline.api.execute import execute
    from paceline.config.validate import planned
    from paceline.runs.run_directory import RunDirectory

    batch = min(cell.batch, 4) if tiny else cell.batch
    blocks = Blocks(cell.workers, cell.block, lambda task: by_hand(cell, task), int(warm * 1e9))
    plan, scheme, objects = planned(
        alternating(task_of(cell, tiny, batch), blocks),
        cell.scheme,
        hyper=cell.hyper,
        workers=cell.workers,
        steps=None,
        seconds=warm + seconds,
        batch=batch,
        device=device,
        checkpoint_seconds=None,
        summaries=False,
        hooks=[Ranks(blocks)],
    )
    with tempfile.TemporaryDirectory() as folder:
        place = RunDirectory.create(Path(folder) / "run", "benchmark")
        plan = dataclasses.replace(plan, directory=str(place.path))
        result = execute(plan, scheme, objects, tell=lambda *_: None, watch=lambda _: None)
    return blocks.result() | {
        "whole_seconds": time.monotonic() - began,
        "peak_rss_mb": result.peak_rss_mb,
    }


def meeting(cell: Cell, device: str, tiny: bool, seconds: float, warm: float) -> dict[str, Any]:
    """Plain loops that meet after every step, in turn with the same loops that do not."""
    batch = min(cell.batch, 4) if tiny else cell.batch

    def begin(_: Any) -> Loop:  # in a worker's process
        import torch

        torch.set_num_threads(1)
        task = task_of(cell, tiny, batch)
        return by_hand(cell, task if device == "cpu" else task.on(torch.device(f"{device.partition(':')[0]}:0")))

    return barrier_alone(Blocks(cell.workers, cell.block, begin, int(warm * 1e9)), warm + seconds)


def task_of(cell: Cell, tiny: bool, batch: int) -> Any:
    from paceline.config import build

    return build.task_of(cell.task, TINY[cell.task] if tiny else {}).configured(batch=batch)


def by_hand(cell: Cell, task: Any) -> Loop:
    """A step of a loop in PyTorch, on the device of the task."""
    if cell.task == VECTOR:
        return _vector_step(task)
    return _module_step(task)


def _vector_step(task: Any) -> Loop:
    import torch

    x = task.start(0)
    g = torch.zeros_like(x)

    def step() -> None:
        x.add_(g, alpha=-1e-9)
        if x.is_cuda:
            torch.cuda.synchronize()

    return step


def _module_step(task: Any) -> Loop:
    import torch

    model = task.module(task.start(0)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    batches = task.batches(0, 1, 1 + RANK[0])
    kind = next(model.parameters()).device.type

    def step() -> None:
        data = next(batches).data
        optimizer.zero_grad()
        with torch.enable_grad(), torch.autocast(kind, task.autocast, enabled=task.autocast is not None):
            loss = task.loss(model(*data[:-1]), data[-1])
        loss.backward()
        optimizer.step()
        loss.item()

    return step


if __name__ == "__main__":
    main()
