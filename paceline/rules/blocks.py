"""Element-wise updates of big vectors: block by block, on the cores that are free.

An update is several operations on the same numbers. On a vector that is larger than the caches each of them would read
memory again, so all of them work on one block before the next. Each number is computed by itself: neither the blocks
nor the threads that work on them change a bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BLOCK = 1 << 19  # numbers: those of four vectors fit the last cache, and torch's cost per operation counts little
MANY = 4  # blocks from which threads are worth waking

Spread = Callable[[Callable[[int], None], int], None]  # calls a function with 0, 1, …, count - 1, in any order


def _in_turn(work: Callable[[int], None], count: int) -> None:
    for number in range(count):
        work(number)


_spread: Spread = _in_turn


def use(spread: Spread | None) -> None:
    """How this process works on many blocks: `spread` may have several threads. None: on one after the other."""
    global _spread
    _spread = spread or _in_turn


def in_blocks(update: Callable[..., None], vectors: tuple[Tensor, ...], *rates: Any, once: bool = False) -> None:
    """`update(*vectors, *rates)`, on ranges of the vectors. `once`: it is a single operation, which gains by blocks
    only if several threads work on them."""
    x = vectors[0]
    count = x.numel()
    if (
        count <= BLOCK
        or (once and _spread is _in_turn)
        or x.device.type != "cpu"
        or any(vector.shape != x.shape for vector in vectors)
    ):
        update(*vectors, *rates)
        return
    blocks = list(zip(*(torch.split(vector, BLOCK) for vector in vectors), strict=True))
    spread = _spread if len(blocks) >= MANY else _in_turn
    spread(lambda number: update(*blocks[number], *rates), len(blocks))
