"""Times and bandwidths with units, as people write them: `35ms`, `10gbit,100us`."""

from __future__ import annotations

import re

from paceline.errors import UsageError

_SECONDS = {"s": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "ns": 1e9}  # in a second
_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_NUMBER = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-zµ]*)$", re.IGNORECASE)
HOW = "BANDWIDTH,LATENCY such as 10gbit,100us"


def duration(text: str, owner: str) -> float:
    """Seconds from `35ms`, `100us`, `2s` or a number of seconds."""
    match = _NUMBER.match(text.strip())
    unit = match[2].lower() if match else ""
    if match is None or (unit and unit not in _SECONDS):
        raise UsageError(f"{owner} is a time such as 35ms, 100us or 2s, not {text!r}")
    return _number(match[1], text, owner) / _SECONDS.get(unit, 1.0)


def has_units(text: str) -> bool:
    """Whether this is `10gbit,100us`, or means to be."""
    first, comma, _ = text.partition(",")
    match = _NUMBER.match(first.strip())
    return bool(comma and match and match[2])


def latency_and_bandwidth(text: str, owner: str) -> tuple[float, float]:
    """Seconds, and bytes per second in each direction, from `10gbit,100us`."""
    words = [word.strip() for word in text.split(",")]
    if len(words) != 2:
        raise UsageError(f"{owner} is {HOW}, not {text!r}")
    match = _NUMBER.match(words[0])
    if match is None or match[2].lower() not in _BITS:
        raise UsageError(f"the bandwidth of {owner} is in {', '.join(_BITS)}: {HOW}, not {text!r}")
    bits = _number(match[1], text, f"the bandwidth of {owner}") * _BITS[match[2].lower()]
    if bits <= 0:
        raise UsageError(f"the bandwidth of {owner} is above 0: {HOW}, not {text!r}")
    return duration(words[1], f"the latency of {owner}"), bits / 8


def _number(text: str, whole: str, owner: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{owner} has something that is not a number: {whole!r}") from None
