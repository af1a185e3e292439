"""What one seed stands for: a scheme, its processes, a network, and a schedule of faults."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.compute_times import parse_times
from paceline.config import build, discovery
from paceline.sampling import portion, sample_seed
from paceline.scheme import Scheme
from paceline.simulator.cost import Cost, parse_link
from paceline.simulator.engine import SimulationEngine
from paceline.simulator.faults import Fault, RunSize, drawn
from paceline.state import Vector
from paceline.task import Batch, Task

LENGTH = 3
LR = 0.0625  # a power of two: sums of it are exact


class Tiny(Task):
    """A gradient that costs next to nothing. `noise`: each mini-batch has its own; else every gradient is all ones."""

    name = "tiny"
    batch = 8

    def __init__(self, noise: bool) -> None:
        self.noise = noise
        self.drawn = 0  # gradients, counted here and by nobody else

    def start(self, seed: int) -> Vector:
        return torch.full((LENGTH,), 4.0)

    def batches(self, rank: int, workers: int, seed: int, first: int = 0) -> Iterator[Batch]:
        _, size, weight = portion(self.batch, self.feed, rank, workers)
        number = first
        while True:
            yield Batch((), size, sample_seed(seed, rank, number), weight)
            number += 1

    def grad(
        self, x: Vector, batch: Batch, out: Vector | None = None, buffers: Mapping[str, Tensor] | None = None
    ) -> tuple[float, Vector]:
        assert out is not None
        self.drawn += 1
        if not self.noise:
            return 1.0, out.fill_(1.0)
        torch.mul(x, 0.5, out=out)
        return 1.0, out.add_((batch.seed % 1009) / 1009 - 0.5)

    def evaluate(self, x: Vector, buffers: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        return {"loss": float(x.square().sum())}


@dataclass(frozen=True)
class Case:
    """All that decides a run; `faults` may be replaced by fewer."""

    seed: int
    scheme: str
    hyper: dict[str, Any]
    workers: int
    servers: int
    updates: int
    checkpoint_every: int
    hold: bool
    processes: int | None  # of an exact run
    noise: bool
    compute: str
    network: str
    faults: tuple[Fault, ...]

    def made(self) -> Scheme:
        return made(self.scheme, tuple(sorted(self.hyper.items())))

    def engine(self, faults: tuple[Fault, ...] | None = None) -> SimulationEngine:
        task = Tiny(self.noise).configured(feed="slice" if self.processes else "shared")
        return SimulationEngine(
            task,
            self.made(),
            workers=self.workers,
            seed=self.seed,
            cost=Cost(parse_times(self.compute), parse_link(self.network)),
            faults=self.faults if faults is None else faults,
            shrink=not self.hold,
            servers=self.servers,
            checkpoint_every=self.checkpoint_every,
            processes=self.processes,
        )

    def with_faults(self, faults: tuple[Fault, ...]) -> Case:
        return dataclasses.replace(self, faults=faults)

    @property
    def window(self) -> int:
        """Gradients of a step, or of what is sent at once."""
        return int(getattr(self.made(), "window", 1))

    def time_limit(self) -> float:
        """No run takes longer: every fault may cost its own time, and all that had been done before it."""
        once = 20 + 3 * self.updates * (2 * self.window + 4)
        lasts = sum(fault.duration + 2 * fault.by for fault in self.faults if math.isfinite(fault.duration))
        return 2 * lasts + once * (1 + len(self.faults))

    def must_reach(self) -> bool:
        """Whether nothing excuses a run that does not reach its goal. A worker that is dead for good is no excuse where
        the quorum shrinks and another worker is left."""
        for_good = [fault for fault in self.faults if not math.isfinite(fault.duration)]
        return not for_good or (all(one.role == "worker" for one in for_good) and not self.hold and self.workers > 1)

    def command(self) -> str:
        faults = "".join(f" --fault {fault}" for fault in self.faults) or " --no-faults"
        return f"python tests/chaos/simulated.py --seed {self.seed} --seeds 1{faults}"

    def __str__(self) -> str:
        words = " ".join(f"{name}={value}" for name, value in self.hyper.items())
        exact = f" exact in {self.processes} processes," if self.processes else ""
        return (
            f"seed {self.seed}: {self.scheme} {words}, {self.workers} workers, {self.servers} servers,{exact} "
            f"{self.updates} updates, a checkpoint every {self.checkpoint_every}, "
            f"quorum {'hold' if self.hold else 'shrink'}, compute {self.compute}, network {self.network or 'free'}"
        )


@cache
def made(scheme: str, hyper: tuple[tuple[str, Any], ...]) -> Scheme:
    return build.scheme_of(kinds()[scheme], dict(hyper))


@cache
def kinds() -> dict[str, type[Scheme]]:
    """Every scheme, by name: looked for once, as that takes longer than a run."""
    return {name: found.value for name, found in discovery.schemes().items()}


@cache
def keys(scheme: str) -> frozenset[str]:
    return frozenset(build.keys_of(kinds()[scheme]))


def case(seed: int, *, serverless: bool = False) -> Case:
    """The run that a seed stands for. `serverless`: of a scheme without a server."""
    rng = np.random.Generator(np.random.PCG64(seed))
    names = [name for name, kind in kinds().items() if not (serverless and (kind.methods or kind.alone))]
    scheme = names[int(rng.integers(len(names)))]
    kind = kinds()[scheme]
    workers = 1 if kind.alone else int(rng.integers(1, 6))
    hyper = _hyper(rng, scheme, workers)
    fixed = made(scheme, tuple(sorted(hyper.items())))
    exact = fixed.exact(workers) is None and rng.random() < 0.5
    servers = int(rng.integers(1, 3)) if fixed.methods and fixed.whole() is None else 1
    updates = int(rng.integers(3, 8))
    crew = RunSize(workers, servers if fixed.methods else 0, updates)
    faults = drawn(seed, int(rng.integers(0, 6)), crew)
    if rng.random() < 0.1:  # somebody dies for good
        deaths = [fault for fault in faults if fault.action == "kill"]
        faults = [dataclasses.replace(one, duration=math.inf) if one in deaths[:1] else one for one in faults]
    return Case(
        seed=seed,
        scheme=scheme,
        hyper=hyper,
        workers=workers,
        servers=servers,
        updates=updates,
        checkpoint_every=int(rng.integers(0, 4)),
        hold=exact or rng.random() < 0.3,
        processes=int(rng.integers(1, workers + 1)) if exact else None,
        noise=exact or rng.random() < 0.6,
        compute=("constant:1.0", "uniform:0.5,1.5", "uniform:0.1,2.0")[int(rng.integers(3))],
        network=("", "", "latency=0.1", "latency=0.4")[int(rng.integers(4))],
        faults=tuple(faults),
    )


def _hyper(rng: np.random.Generator, scheme: str, workers: int) -> dict[str, Any]:
    known = keys(scheme)
    hyper: dict[str, Any] = {"lr": LR}
    if "window" in known:
        hyper["window"] = int(rng.integers(1, 4))
    if "size" in known:
        hyper["size"] = int(rng.integers(1, 4))
    if "pushes" in known:  # of one update: by default more than the time limit has room for
        hyper["pushes"] = 2
    if "windows" in known:
        hyper["windows"] = (int(rng.integers(1, 3)), int(rng.integers(1, 4)))
    if "chunks" in known:
        hyper["chunks"] = int(rng.integers(1, 4))
    if "aggregate" in known and rng.random() < 0.4:
        hyper["aggregate"] = int(rng.integers(1, workers + (3 if scheme == "sync-repeat" else 1)))
    return hyper
