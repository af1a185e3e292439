"""n-softsync: updates of several pushes, each divided by its staleness."""

from dataclasses import dataclass
from typing import Literal

from paceline.errors import UsageError
from paceline.scheme import Count, Vector
from paceline.schemes.k_async import KBatchAsync


@dataclass(frozen=True)
class Softsync(KBatchAsync, name="softsync"):
    """n-softsync, staleness-aware: every workers / n pushes make an update; each is divided by its staleness.

    Zhang, Gupta, Lian, Liu, Staleness-aware Async-SGD for Distributed Deep Learning, 2015 (arXiv 1511.05950).

    worker:  x, v <- pull();  g <- gradient(x);  push(g, v, i)
    server:  push: tau <- v_now - v;  keep g / max(1, tau)
             when k = floor(workers / n) are here: x <- x - lr * mean of them;  v <- v + 1

    n is the mean staleness, about; `n=1`, the default, collects as many gradients as there are workers, which is not
    `sync`: a fast worker counts twice, and gradients may be stale. `weight=constant` divides by nothing. `dynsgd`
    divides by tau + 1, not by tau. k replaces n if given.
    """

    n: Count = 1
    weight: Literal["staleness", "constant"] = "staleness"
    family = "bounded or corrected staleness"
    good_for = "uneven workers that never wait, where a slow one's old gradients must not count in full"
    volume = "2"
    limit = "as k-batch-async, at a rate of lr / n"
    equals = "n=workers, weight=constant is async; workers=1 is sgd"

    def wanted(self, workers: int) -> int:
        return self.k or max(1, workers // self.n)

    def weighed(self, g: Vector, staleness: int) -> Vector:
        return g if self.weight == "constant" or staleness <= 1 else g / staleness

    def check(self, workers: int) -> None:
        if self.k is None and self.n > workers:
            raise UsageError(
                f"softsync: n is {self.n}, but {workers} workers allow at most n={workers}, which is async"
            )
