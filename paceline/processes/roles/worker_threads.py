"""Several workers in one process: a thread for each, which take turns at the model that they share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


def turn() -> threading.RLock:
    """What a worker holds while it draws a batch, computes a gradient or evaluates: the model, and torch's random
    numbers, are one for the whole process. Nobody waits for others while holding it."""
    return threading.RLock()


def hosted(ranks: Sequence[int], play: Callable[[int], None], failed: Callable[[int, BaseException], None]) -> bool:
    """Play every rank to its end, side by side. What one raises is handed to `failed` at once, which lets the others
    end; False if there was any such thing."""
    broken: list[int] = []

    def one(rank: int) -> None:
        try:
            play(rank)
        except BaseException as error:
            broken.append(rank)
            failed(rank, error)

    threads = [threading.Thread(target=one, args=(rank,), name=f"worker:{rank}") for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return not broken
