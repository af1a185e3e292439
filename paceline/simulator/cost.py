"""Virtual times: of a gradient (laws: compute_times.py), of a message, of a pass over the shared vector."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from paceline.compute_times import ComputeTime, Constant, Exponential, Rng, filled
from paceline.errors import UsageError
from paceline.simulator import network_units


@dataclass(frozen=True)
class NetworkLink:
    """A network connection: seconds per message, bytes per second."""

    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and math.isfinite(self.latency) and self.bandwidth > 0):
            raise UsageError(
                f"a link needs a finite latency >= 0 and a bandwidth > 0, not {self.latency:g}, {self.bandwidth:g}"
            )

    def seconds(self, size: int) -> float:
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Cost:
    """Virtual time of a run. `speeds[i]` divides worker i's times; `links[i]` replaces the network for worker i.

    `access` is how long one pass over the shared vector takes at speed 1 in a call that is not atomic (HogWild).
    """

    compute_law: ComputeTime = field(default_factory=Constant)
    network: NetworkLink = field(default_factory=NetworkLink)
    speeds: tuple[float, ...] = ()
    links: Mapping[int, NetworkLink] = field(default_factory=dict)
    access: ComputeTime | float = field(default_factory=lambda: Exponential(0.1))

    def __post_init__(self) -> None:
        if any(not speed > 0 for speed in self.speeds):
            raise UsageError(f"speeds must be above 0, not {', '.join(map(str, self.speeds))}")
        if not isinstance(self.access, ComputeTime):
            if not (self.access >= 0 and math.isfinite(self.access)):
                raise UsageError(f"access must be a finite number of at least 0, not {self.access:g}")
            object.__setattr__(self, "access", Constant(float(self.access)))

    def check(self, workers: int) -> None:
        """Raise UsageError if this does not fit the number of workers."""
        if self.speeds and len(self.speeds) != workers:
            raise UsageError(f"{len(self.speeds)} speeds were given for {workers} workers; give one for each")
        for rank in self.links:
            if not 0 <= rank < workers:
                raise UsageError(f"a link was given for worker {rank}; workers are 0 to {workers - 1}")
        assert isinstance(self.access, ComputeTime)
        self.compute_law.check()
        self.access.check()

    def compute(self, rank: int, t: int, rng: Rng) -> float:
        """The seconds that gradient number `t` of a worker takes."""
        seconds = self.compute_law.draw(rank, t, rng)
        return seconds / self.speeds[rank] if self.speeds else seconds

    def pass_over(self, rank: int, pieces: int, seed: int) -> list[float]:
        """When worker `rank` reaches each piece of the shared vector. A faster worker overtakes another one, and so
        reads or leaves a torn vector; with constant times and equal speeds none does."""
        assert isinstance(self.access, ComputeTime)
        share = 1 / (pieces * (self.speeds[rank] if self.speeds else 1.0))
        if isinstance(self.access, Constant):
            return [k * self.access.seconds * share for k in range(pieces)]
        rng = np.random.Generator(np.random.PCG64(seed))
        draws = [self.access.draw(rank, k, rng) * share for k in range(pieces - 1)]
        return list(accumulate(draws, initial=0.0))

    def message(self, rank: int, size: int) -> float:
        """Between a worker and the server."""
        return self.links.get(rank, self.network).seconds(size)


def parse_link(text: str, owner: str = "network") -> NetworkLink:
    """`latency=0.001,bandwidth=1e9` or `0.001,1e9`, in seconds and bytes per second; or `1gbit,100us`."""
    if network_units.has_units(text):
        return NetworkLink(*network_units.latency_and_bandwidth(text, f"the {owner}"))
    link: NetworkLink = filled(NetworkLink, owner, text, text)
    return link


def parse_links(texts: list[str]) -> dict[int, NetworkLink]:
    """`2:latency=0.1,bandwidth=1e6`, one for each worker whose link differs."""
    links = {}
    for text in texts:
        rank, colon, rest = text.partition(":")
        if not colon or not rank.strip().isdigit():
            raise UsageError(f"a link is 'RANK:latency=S,bandwidth=BYTES_PER_SECOND', not {text!r}")
        links[int(rank)] = parse_link(rest, f"link of worker {int(rank)}")
    return links
