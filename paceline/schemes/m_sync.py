"""m-Synchronous SGD: synchronous SGD with the fastest m workers of every round."""

from dataclasses import dataclass

from paceline.schemes.k_sync import KSync


@dataclass(frozen=True)
class MSync(KSync, name="m-sync"):
    """m-Synchronous SGD: the first k (the paper's m) workers of a round make the update, the others are stopped.

    m-Synchronous SGD, 2026 (arXiv 2602.03802): near-optimal, up to logarithms, under many laws of random times.

    worker:  x, v <- pull() once version v is open;  g <- gradient(x), stopped when v + 1 is there;  push(g, v, i)
    server:  push: if v is old: drop;  keep g;  when k workers' are here: x <- x - lr * mean of them;  v <- v + 1

    k: all workers but a tenth, at least one, unless given. The same as `k-sync` with that k.
    """

    family = "optimal time"
    good_for = "random compute times: a plain method that is hard to beat"
    volume = "2"
    limit = "lr * h < 2"
    equals = "the same as k-sync; k=workers is sync"

    def wanted(self, workers: int) -> int:
        return self.k or max(1, workers - max(1, workers // 10))
