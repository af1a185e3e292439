"""One GPU: milliseconds per step of paceline beside a plain PyTorch loop, and the time to the first step.

Every cell runs in processes of its own, within a time limit, through the public API; the JSON file is written after
each cell. Training is measured between two moments after `--warm` seconds, without start and end.

    python benchmarks/gpu.py --out gpu.json
    python benchmarks/gpu.py --device cpu --tiny --seconds 1 --warm 0.5      # on any machine
    python benchmarks/gpu.py --list
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from speed import Speed

HERE = Path(__file__).resolve().parent
GPT, VECTOR, CNN = f"{HERE / 'gpu_tasks.py'}:gpt", f"{HERE / 'gpu_tasks.py'}:vector", "mnist-cnn"
TINY: dict[str, dict[str, Any]] = {
    GPT: {"layers": 2, "width": 64, "heads": 2, "context": 16, "half": False},
    VECTOR: {"length": 100_000},
    CNN: {},
}


@dataclass(frozen=True)
class Cell:
    """A measurement: a scheme of paceline, or a plain loop. `beside`: the cell that its speed is compared with."""

    task: str
    scheme: str | None = None
    workers: int = 1
    batch: int = 32
    beside: str | None = None
    item: bool = True  # a plain loop reads the loss after every step
    hyper: dict[str, Any] = field(default_factory=lambda: {"lr": 0.001})


def _windowed(scheme: str, workers: int, beside: str) -> Cell:
    return Cell(GPT, scheme, workers, beside=beside, hyper={"lr": 0.001, "window": 10})


CELLS = {
    "gpt plain": Cell(GPT),
    "gpt plain, loss not read": Cell(GPT, item=False),
    "gpt sgd": Cell(GPT, "sgd", beside="gpt plain"),
    "gpt async x1": Cell(GPT, "async", beside="gpt plain"),
    "gpt agn window=10 x1": _windowed("agn", 1, "gpt plain"),
    "gpt plain x2": Cell(GPT, workers=2),
    "gpt async x2": Cell(GPT, "async", 2, beside="gpt plain x2"),
    "gpt allreduce x2": Cell(GPT, "allreduce", 2, beside="gpt plain x2"),
    "gpt agn window=10 x2": _windowed("agn", 2, "gpt plain x2"),
    "gpt averaging window=10 x2": _windowed("averaging", 2, "gpt plain x2"),
    "vector plain": Cell(VECTOR, batch=1, item=False),
    "vector async x1": Cell(VECTOR, "async", batch=1, beside="vector plain"),
    "vector allreduce x2": Cell(VECTOR, "allreduce", 2, batch=1, beside="vector plain"),
    "cnn plain": Cell(CNN, batch=256),
    "cnn sgd": Cell(CNN, "sgd", batch=256, beside="cnn plain"),
    "cnn async x1": Cell(CNN, "async", batch=256, beside="cnn plain"),
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), metavar="CELL")
    options.add_argument("--only", default="", help="cells whose name holds this text")
    options.add_argument("--list", action="store_true", help="print the names of the cells")
    options.add_argument("--device", default="cuda")
    options.add_argument("--tiny", action="store_true", help="models of a few thousand parameters")
    options.add_argument("--seconds", type=float, default=5.0, help="of every measurement")
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
    """Medians over the rounds, and each speed as a share of the plain loop's."""
    cells: dict[str, dict[str, Any]] = {}
    for name, rounds in found.items():
        whole = [one for one in rounds if "error" not in one]
        if not whole:
            cells[name] = rounds[-1]
            continue
        cells[name] = {key: round(statistics.median(one[key] for one in whole), 4) for key in whole[0]}
        if len(whole) > 1:
            cells[name]["rounds"] = [round(one["ms_per_step"], 4) for one in whole]
        plain = cells.get(CELLS[name].beside or "", {}).get("ms_per_step")
        if plain:
            cells[name]["share"] = round(plain / cells[name]["ms_per_step"], 4)
            cells[name]["extra_ms"] = round(cells[name]["ms_per_step"] - plain, 4)
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
    text = f"{name:28} {cell['ms_per_step']:9.3f} ms per step"
    if "share" in cell:
        text += f"  share {cell['share']:.3f}  extra {cell['extra_ms']:8.3f} ms"
    if "time_to_first_step" in cell:
        text += f"  first step after {cell['time_to_first_step']:.2f} s"
    return text


# in the process of a cell


def measured(cell: Cell, device: str, tiny: bool, seconds: float, warm: float) -> dict[str, Any]:
    if cell.scheme is not None:
        return paced(cell, device, tiny, seconds, warm)
    if cell.workers == 1:
        return {"ms_per_step": plain(cell, device, tiny, seconds, warm)}
    context = get_context("spawn")
    begin = context.Barrier(cell.workers)
    with context.Pool(cell.workers, initializer=_hold, initargs=(begin,)) as pool:
        work = [pool.apply_async(_beside, (cell, device, tiny, seconds, warm)) for _ in range(cell.workers)]
        times = [one.get() for one in work]
    return {"ms_per_step": cell.workers / sum(1 / one for one in times)}


_BEGIN: list[Any] = []


def _hold(begin: Any) -> None:
    _BEGIN.append(begin)


def _beside(cell: Cell, device: str, tiny: bool, seconds: float, warm: float) -> float:
    return plain(cell, device, tiny, seconds, warm, begin=_BEGIN[0])


def task_of(cell: Cell, tiny: bool) -> Any:
    from paceline.config import build

    batch = min(cell.batch, 4) if tiny else cell.batch
    return build.task_of(cell.task, TINY[cell.task] if tiny else {}).configured(batch=batch)


def plain(cell: Cell, device: str, tiny: bool, seconds: float, warm: float, begin: Any = None) -> float:
    """Milliseconds per step of a loop in PyTorch."""
    import torch

    torch.set_num_threads(1)
    task = task_of(cell, tiny)
    if device != "cpu":
        task = task.on(torch.device(device if ":" in device else f"{device}:0"))
    step = _vector_step(task) if cell.task == VECTOR else _module_step(task, device, cell.item)
    batches = task.batches(0, 1, 0)

    def train(length: float) -> tuple[int, float]:
        steps, began = 0, time.perf_counter()
        while time.perf_counter() - began < length:
            for _ in range(5):  # asking the clock must not matter, and the GPU's queue is bounded by the synchronise
                step(next(batches))
            steps += 5
            if device != "cpu" and not cell.item:
                torch.cuda.synchronize()
        return steps, time.perf_counter() - began

    step(next(batches))
    if begin is not None:
        begin.wait()
    train(warm)
    steps, passed = train(seconds)
    return passed / steps * 1000


def _vector_step(task: Any) -> Any:
    x = task.start(0)
    g = x.clone()

    def step(batch: Any) -> None:
        task.grad(x, batch, g)
        x.add_(g, alpha=-1e-9)

    return step


def _module_step(task: Any, device: str, item: bool) -> Any:
    import torch

    model = task.module(task.start(0)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    kind = torch.device(device).type

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        with torch.autocast(kind, task.autocast, enabled=task.autocast is not None):
            loss = task.loss(model(*batch.data[:-1]), batch.data[-1])
        loss.backward()
        optimizer.step()
        if item:
            loss.item()

    return step


def paced(cell: Cell, device: str, tiny: bool, seconds: float, warm: float) -> dict[str, Any]:
    """A run of paceline. Its speed is that of the samples between two moments that the launcher tells of."""
    began = time.monotonic()
    import paceline

    speed = Speed()
    batch = min(cell.batch, 4) if tiny else cell.batch
    with tempfile.TemporaryDirectory() as folder:
        result = paceline.train(
            cell.task,
            cell.scheme,
            workers=cell.workers,
            steps=None,
            seconds=warm + seconds,
            batch=batch,
            device=device,
            task_options=TINY[cell.task] if tiny else {},
            directory=Path(folder) / "run",
            checkpoint_seconds=None,
            watch=speed.watch,
            say=lambda text: print(text, file=sys.stderr),
            **cell.hyper,
        )
    rate = speed.samples_per_second(warm)
    if rate is None:
        raise SystemExit(f"the run gave {speed.seen[-1:]} samples: too few; give more --seconds")
    return {
        "ms_per_step": batch * cell.workers / rate * 1000,
        "time_to_first_step": result.time_to_first_step,
        "whole_seconds": time.monotonic() - began,
        "peak_rss_mb": result.peak_rss_mb,
    }


if __name__ == "__main__":
    main()
