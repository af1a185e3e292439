"""Ringmaster ASGD: asynchronous SGD that uses no gradient above a threshold of staleness, and stops it if it can."""

from collections.abc import Iterator
from dataclasses import dataclass

from paceline import stability
from paceline.scheme import Count, State, Vector, on_server
from paceline.schemes._pushed import Pushed
from paceline.worker import Worker


@dataclass(frozen=True)
class Ringmaster(Pushed):
    """Ringmaster ASGD: a gradient whose staleness reaches the threshold is stopped, or dropped when it comes.

    Maranjyan, Tyurin, Richtarik, Ringmaster ASGD: The First Asynchronous SGD with Optimal Time Complexity, 2025
    (arXiv 2501.16168).

    worker:  x, v <- pull();  g <- gradient(x), stopped when version v + threshold is there;  push(g, v)
    server:  push: if v_now - v < threshold: x <- x - lr * g;  v <- v + 1;  else drop

    threshold: the number of workers unless given; theory takes sigma^2 / epsilon. `stop=false` lets every gradient
    end. In processes a gradient is stopped between two layers, and by tasks that cannot stop at its end
    (docs/add-a-scheme.md).
    """

    threshold: Count | None = None
    stop: bool = True
    family = "optimal time"
    good_for = "very uneven workers with data alike: the optimal time of all asynchronous methods"
    volume = "2"
    limit = "lr * h < 2 sin(pi / (2 (2 threshold - 1)))"
    equals = "a large threshold is async; threshold=1 is sgd on whichever gradient comes first; workers=1 is sgd"

    @on_server
    def push(self, s: State, g: Vector, v: int, rank: int) -> None:
        if s.v - v >= (self.threshold or s.workers):
            s.refuse()
            return
        s.admit(v)
        self.rule.apply(s, g, self.lr)
        s.v += 1

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull()
        g = await w.grad(w.x, until=w.v + (self.threshold or w.workers) if self.stop else None)
        if g is not None:
            await self.push(g, w.v, w.rank)

    def warnings(self, workers: int, curvature: float | None) -> Iterator[str]:
        return stability.asynchronous(self, min(workers, self.threshold or workers), curvature)
