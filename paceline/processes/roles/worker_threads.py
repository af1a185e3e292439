"""Several workers in one process: a thread for each, which take turns at the model that they share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


def turn() -> threading.RLock:
    """The lock that a worker holds while it draws a batch, computes a gradient or evaluates: the process has one model,
    and one state of torch's random numbers. No worker waits for another process while it holds the lock."""
    return threading.RLock()


def hosted(ranks: Sequence[int], play: Callable[[int], None], failed: Callable[[int, BaseException], None]) -> bool:
    """Run every rank to its end, each in a thread. An error of one is given to `failed` at once, which stops the
    others; False if there was an error."""
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
