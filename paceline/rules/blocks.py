"""Element-wise updates of big vectors: block by block, on the cores that are free.

An update is several operations on the same numbers. On a vector that is larger than the caches each of them would read
memory again, so all of them work on one block before the next. A block is as many pieces as there are threads: torch
gives each thread the same piece in every operation, which stays in the cache of its core. Each number is computed by
itself: neither blocks nor threads change a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

BLOCK = 1 << 19  # numbers: those of four vectors fit the last cache, and torch's cost per operation counts little
PIECE = 1 << 17  # least numbers of a thread in a block
WIDE = 1 << 20  # numbers from which several threads are worth waking

_threads = 1


def use_cores(number: int) -> None:
    """Let this process use so many cores for the update of a big vector."""
    global _threads
    _threads = max(number, 1)


def in_blocks(update: Callable[..., None], vectors: tuple[Tensor, ...], *rates: Any, once: bool = False) -> None:
    """`update(*vectors, *rates)`, on one range of the vectors after another. `once`: it is a single operation, which
    gains nothing by that."""
    count = vectors[0].numel()
    if count <= BLOCK or vectors[0].device.type != "cpu" or any(vector.dim() != 1 for vector in vectors):
        update(*vectors, *rates)
        return
    with several_threads(count) as threads:
        if once:
            update(*vectors, *rates)
            return
        size = max(BLOCK, PIECE * threads)
        for parts in zip(*(vector.split(size) for vector in vectors), strict=True):
            update(*parts, *rates)


@contextmanager
def several_threads(count: int) -> Iterator[int]:
    """Inside, torch computes with all cores that this process may use for `count` numbers; gives their number."""
    before = torch.get_num_threads()
    threads = max(min(_threads, count // PIECE), before) if count >= WIDE else before
    if threads == before:
        yield before
        return
    torch.set_num_threads(threads)
    try:
        yield threads
    finally:
        torch.set_num_threads(before)
