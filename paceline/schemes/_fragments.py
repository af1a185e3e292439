"""Fragments: the parts of the vector that a scheme exchanges one after the other."""

from functools import lru_cache
from itertools import accumulate
from typing import Literal

import torch

from paceline.compressor import Fragment
from paceline.scheme import Named, Vector

Pattern = Literal["strided", "sequential"]


@lru_cache
def fragments(parameters: Named, length: int, count: int, pattern: Pattern) -> tuple[Fragment, ...]:
    """A vector in `count` fragments, by the layers of its parameters. `strided`: layer k is in fragment k mod count;
    `sequential`: layers that follow each other are together. A vector with fewer layers is cut in equal parts."""
    layers = _layers(parameters, length)
    count = min(count, length)
    if len(layers) < count:
        return tuple(((length * k // count, length * (k + 1) // count),) for k in range(count))
    if pattern == "strided":
        return tuple(_joined(layers[k::count]) for k in range(count))
    ends: list[int] = []
    for k in range(count):  # layers whose middle is before the end of an equal part; no fragment is empty
        wanted = sum(low + high <= 2 * length * (k + 1) / count for low, high in layers)
        ends.append(min(max(wanted, ends[-1] + 1 if ends else 1), len(layers) - count + k + 1))
    return tuple(_joined(layers[low:high]) for low, high in zip([0, *ends], ends, strict=False))


@lru_cache
def tensors(parameters: Named, length: int, fragment: Fragment) -> tuple[tuple[int, int], ...]:
    """The parameters in a fragment, as ranges of its numbers; all of it, if the task does not know them."""
    sizes = [torch.Size(shape).numel() for _, shape in parameters]
    ends = list(accumulate(sizes)) if sum(sizes) == length else [length]
    found, at = [], 0
    for low, high in fragment:
        inside = [(max(low, first), min(high, last)) for first, last in zip([0, *ends], ends, strict=False)]
        found += [(at + first - low, at + last - low) for first, last in inside if first < last]
        at += high - low
    return tuple(found)


def taken(v: Vector, fragment: Fragment) -> Vector:
    """The numbers of a fragment: of a single range a view of them."""
    parts = [v[low:high] for low, high in fragment]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def put(v: Vector, fragment: Fragment, numbers: Vector) -> None:
    """Write the numbers of a fragment into a vector."""
    at = 0
    for low, high in fragment:
        v[low:high] = numbers[at : at + high - low]
        at += high - low


def _layers(parameters: Named, length: int) -> list[tuple[int, int]]:
    """The ranges of the layers: parameters of one block of a list (`blocks.3.…`), or else of one module."""
    found: dict[str, tuple[int, int]] = {}
    at = 0
    for name, shape in parameters:
        words = name.split(".")
        numbered = next((k for k, word in enumerate(words) if word.isdigit()), None)
        layer = ".".join(words[:-1] or words) if numbered is None else ".".join(words[: numbered + 1])
        size = torch.Size(shape).numel()
        low, high = found.get(layer, (at, at))
        key = layer if high == at else f"{layer} at {at}"  # parameters of another layer are between
        found[key] = (low if high == at else at, at + size)
        at += size
    return list(found.values()) if at == length else [(0, length)]


def _joined(layers: list[tuple[int, int]]) -> Fragment:
    """Ranges in order, without gaps between those that touch."""
    joined: list[tuple[int, int]] = []
    for low, high in layers:
        if joined and joined[-1][1] == low:
            joined[-1] = (joined[-1][0], high)
        else:
            joined.append((low, high))
    return tuple(joined)
