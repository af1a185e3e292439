"""How people write the settings of a plan: numbers of workers, networks, durations, stragglers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.compute_times import ComputeTime, parse_times
from paceline.errors import UsageError
from paceline.simulator import network_units
from paceline.simulator.cost import NetworkLink

LARGEST = 4096


def worker_numbers(text: str) -> tuple[int, ...]:
    """`2..256`: 2, then powers of two up to 256; `2,4,6`: these numbers."""
    first, dots, last = text.partition("..")
    try:
        if dots:
            low, high = int(first), int(last)
            between = [2**power for power in range(high.bit_length()) if low < 2**power < high] if low > 0 else []
            found = sorted({low, *between, high})
            if low > high:
                raise UsageError(f"plan: workers {text!r} begin above their end")
        else:
            found = sorted({int(word) for word in text.split(",")})
    except ValueError:
        raise UsageError(f"plan: workers are 2..256 (powers of two) or a list 2,4,8, not {text!r}") from None
    if found[0] < 1 or found[-1] > LARGEST:
        wrong = found[0] if found[0] < 1 else found[-1]
        raise UsageError(f"plan: workers are from 1 to {LARGEST:,}, not {wrong:,}")
    return tuple(found)


def duration(text: str, owner: str) -> float:
    """Seconds from `35ms`, `100us`, `2s` or a number of seconds."""
    return network_units.duration(text, f"plan: {owner}")


def network_of(text: str) -> NetworkLink:
    """`10gbit,100us`: the bandwidth of a node in each direction, and the latency of a message one way."""
    return NetworkLink(*network_units.latency_and_bandwidth(text, "plan: a network"))


def network_text(link: NetworkLink) -> str:
    """As it is written: 10 Gbit/s, 100 µs."""
    if math.isinf(link.bandwidth):
        return f"no limit, {seconds_text(link.latency)}"
    bits = link.bandwidth * 8
    size, unit = next(((size, unit) for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if bits >= size), (1.0, ""))
    return f"{bits / size:g} {unit}bit/s, {seconds_text(link.latency)}"


@dataclass(frozen=True)
class Stragglers:
    """How unequal the gradients of nodes are. `factors`: a law of factors of the gradient's mean time, of mean 1; None:
    as measured. A `share` of the nodes is `slower` times slower all the time."""

    factors: ComputeTime | None = None
    share: float = 0.0
    slower: float = 1.0

    @classmethod
    def read(cls, text: str) -> Stragglers:
        """`measured`, `none`, `slow:0.1,5`, or a law of `paceline list compute` (exponential:1)."""
        text = text.strip()
        if text in ("", "measured"):
            return cls()
        if text == "none":
            return cls(parse_times("constant:1"))
        name, _, rest = text.partition(":")
        if name != "slow":
            if name == "trace":
                raise UsageError("plan: stragglers are a law of factors; a file of times is for `simulate --compute`")
            return cls(parse_times(text))
        words = rest.split(",")
        try:
            share, slower = map(float, words)
        except ValueError:
            raise UsageError(f"plan: slow nodes are slow:SHARE,FACTOR such as slow:0.1,5, not {text!r}") from None
        if not (0 <= share <= 1 and slower >= 1 and math.isfinite(slower)):
            raise UsageError(
                f"plan: slow:SHARE,FACTOR has a share from 0 to 1 and a factor of at least 1, not {text!r}"
            )
        return cls(None, share, slower)

    def speeds(self, workers: int) -> tuple[float, ...]:
        """Of each node; the slow ones are the last, and at least one where there is a share."""
        slow = math.ceil(self.share * workers - 1e-9)
        return () if not slow else (1.0,) * (workers - slow) + (1 / self.slower,) * slow


def seconds_text(seconds: float) -> str:
    """A time with three digits: 35 ms, 1.2 s, 14 min, 3.1 h."""
    if not math.isfinite(seconds):
        return "for ever"
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms")):
        if seconds >= size * (1.0 if size != 60.0 else 2.0):
            return f"{_three(seconds / size)} {unit}"
    return "0 s" if seconds == 0 else f"{_three(seconds / 1e-6)} µs"


def count_text(value: float) -> str:
    """A large number in at most five characters: 950, 12.3k, 1.25M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size * 0.9995:
            return f"{_three(value / size)}{unit}"
    return _three(value)


def bytes_text(size: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{_three(size / unit)} {name}"
    return f"{size:g} bytes"


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"
