"""Rennala SGD: batches of gradients at one x, from whichever workers are fast."""

from dataclasses import dataclass

from paceline.schemes.k_sync import KBatchSync


@dataclass(frozen=True)
class Rennala(KBatchSync, name="rennala"):
    """Rennala SGD: a round takes the first k gradients at its x, from any workers; the rest are stopped.

    Tyurin, Richtarik, Optimal Time Complexities of Parallel Stochastic Optimization Methods Under a Fixed Computation
    Model, NeurIPS 2023.

    worker:  x, v <- pull();  g <- gradient(x), stopped when version v + 1 is there;  push(g, v, i)
    server:  push: if v is old: drop;  keep g;  when k are here: x <- x - lr * mean of them;  v <- v + 1

    k: the number of workers unless given; theory takes sigma^2 / epsilon. The same as `k-batch-sync` with that k.
    """

    waits = "never"
    family = "optimal time"
    good_for = "uneven workers with data alike: optimal time without any staleness"
    volume = "2"
    limit = "lr * h < 2"
    equals = "the same as k-batch-sync; workers=1, k=1 is sgd"

    def wanted(self, workers: int) -> int:
        return self.k or workers
