"""Slurm's short forms: `c[7001-7004,7010]` for hosts, `2(x3),1` for tasks per node, `12000-12003` for ports."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from math import prod

from paceline.errors import UsageError
from paceline.network.cluster.detect import LIMIT

_WORD = re.compile(r"(?:[^\[\],\s]|\[[^\[\]\s]*\])+")
_PART = re.compile(r"\[([^\]]*)\]|([^\[]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")


def hosts(text: str, where: str) -> list[str]:
    """Every host of a compressed list, in its order; several brackets in a name multiply, the last runs fastest."""
    found: list[str] = []
    for word in _words(text, where):
        parts = [_choices(inside, fixed, where, text) for inside, fixed in _PART.findall(word)]
        if len(found) + prod(count for count, _ in parts) > LIMIT:
            raise UsageError(f"{where}: {text!r} stands for more than {LIMIT:,} hosts")
        found += map("".join, itertools.product(*(choices for _, choices in parts)))
    return found


def counts(text: str, where: str) -> list[int]:
    """Tasks per node: `2(x3),1` is 2, 2, 2, 1."""
    found: list[int] = []
    for word in text.split(","):
        match = _COUNT.fullmatch(word.strip())
        if match is None:
            raise UsageError(f"{where}: cannot read {word!r} in {text!r}; it should look like 2(x3),1")
        tasks, nodes = int(match[1]), int(match[2] or 1)
        if nodes == 0 or tasks == 0:
            raise UsageError(f"{where}: {word!r} in {text!r} counts nothing")
        if sum(found) + tasks * nodes > LIMIT:
            raise UsageError(f"{where}: {text!r} counts more than {LIMIT:,} tasks")
        found += [tasks] * nodes
    return found


def ports(text: str, where: str) -> list[int]:
    """Ports: one, a range, a list of both."""
    found: list[int] = []
    inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    for low, high in _ranges(inside, where, text):
        if not 1 <= int(low) <= int(high) <= 65535:
            raise UsageError(f"{where}: {text!r} holds no ports from 1 to 65535")
        found += range(int(low), int(high) + 1)
    if len(set(found)) < len(found):
        raise UsageError(f"{where}: {text!r} holds a port twice")
    return found


def _words(text: str, where: str) -> Iterator[str]:
    """What the commas outside of brackets part."""
    at = 0
    while True:
        match = _WORD.match(text, at)
        at = at if match is None else match.end()
        if match is None or text[at : at + 1] not in ("", ","):
            raise UsageError(f"{where}: cannot read {text!r} at {text[at : at + 12]!r}; it should look like c[01-03,7]")
        yield match[0]
        if at == len(text):
            return
        at += 1


def _choices(inside: str, fixed: str, where: str, text: str) -> tuple[int, Iterator[str]]:
    """How many texts can stand at one place of a name, and which; they are made only when asked for."""
    if fixed:
        return 1, iter([fixed])
    ranges = list(_ranges(inside, where, text))
    numbers = (str(n).zfill(len(low)) for low, high in ranges for n in range(int(low), int(high) + 1))
    return sum(int(high) - int(low) + 1 for low, high in ranges), numbers


def _ranges(inside: str, where: str, text: str) -> Iterator[tuple[str, str]]:
    for item in inside.split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None:
            raise UsageError(f"{where}: cannot read {item!r} in {text!r}; it should be a number or a range as 01-03")
        low, high = match[1], match[2] or match[1]
        if int(low) > int(high):
            raise UsageError(f"{where}: the range {item} in {text!r} runs backwards")
        if high.startswith("0") and len(high) != len(low):
            raise UsageError(f"{where}: the ends of the range {item} in {text!r} have different zeros in front")
        yield low, high
