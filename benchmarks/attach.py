"""What `paceline.attach` costs a step of one worker: a script's plain loop and the same loop attached, in one run.

    python benchmarks/attach.py [--steps 2000] [--rounds 5]

Prints microseconds a step and their difference, medians over rounds that alternate between the two.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import paceline

Batches = list[tuple[Tensor, Tensor]]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def deep() -> nn.Module:
    """Many small parameters: forty layers."""
    torch.manual_seed(0)
    layers = [layer for _ in range(40) for layer in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(nn.Linear(784, 32), *layers, nn.Linear(32, 10))


def plain(model: nn.Module, batches: Batches, steps: int) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    began = time.perf_counter()
    for step in range(steps):
        images, labels = batches[step % len(batches)]
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        loss.item()
        optimizer.step()
    return time.perf_counter() - began


def attached(scheme: str) -> Callable[[nn.Module, Batches, int], float]:
    def run(model: nn.Module, batches: Batches, steps: int) -> float:
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "run"
            with paceline.attach(model, scheme, lr=0.05, steps=steps + 50, directory=path) as pace:
                for step, (images, labels) in enumerate(pace.share(batches)):
                    if step == 50:
                        began = time.perf_counter()
                    pace.step(cross_entropy(model(images), labels))
                    if step == steps + 49:
                        took = time.perf_counter() - began
            return took

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    batches = [(torch.rand(32, 784), torch.randint(10, (32,))) for _ in range(50)]
    ways = {"plain loop": plain, "attached, sgd": attached("sgd"), "attached, async": attached("async")}
    for make in (mlp, deep):
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, way in ways.items():
                times[name].append(way(make(), batches, options.steps) / options.steps * 1e6)
        base = statistics.median(times["plain loop"])
        parameters = len(list(make().parameters()))
        print(f"{make.__name__}: {parameters} parameter tensors")
        for name in ways:
            took = statistics.median(times[name])
            print(f"  {name:<16} {took:7.0f} µs a step   {took - base:+6.0f} µs   {base / took:.2f} of the plain loop")


if __name__ == "__main__":
    main()
