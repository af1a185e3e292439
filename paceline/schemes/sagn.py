"""SAGN: synchronous accumulated gradient normalisation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline import stability
from paceline.rules import SGD, Rule
from paceline.scheme import Count, State, Vector
from paceline.schemes.sync import SyncSGD
from paceline.worker import Worker


@dataclass(frozen=True)
class SAGN(SyncSGD):
    """Synchronous AGN: windows of local steps from the common x; the means of their gradients are averaged.

    The synchronous form of Hermans, Spanakis, Moeckel 2017 (arXiv 1710.02368), after the distributed TensorFlow guides.

    worker:  x, v <- pull();  y <- x;  `window` times: g <- gradient(y);  a <- a + g;  y <- y - lr * g
             push(a / window, v, i)
    server:  when all are here: x <- x - lr * mean over workers;  v <- v + 1

    A window of one is synchronous SGD. Backup workers, `repeat` and the start barrier are those of `sync`.
    """

    server_rule: Rule = SGD()
    window: Count = 5

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, next=0, **self.rule.cells(x0))

    async def gradient(self, w: Worker) -> Vector:
        steps = self.rule.window(w.state, self.lr)
        for _ in range(self.window):
            steps.step(await w.grad(w.x))
        return steps.sum / self.window

    def _centre_rule(self) -> Rule:
        return self.server_rule

    def warnings(self, workers: int, curvature: float | None) -> Iterator[str]:
        if curvature is not None and type(self.rule) is SGD and type(self.server_rule) is SGD:
            local, central = self.rule.rate(self.lr), self.server_rule.rate(self.lr)
            gain = stability.window_gain(local * curvature, self.window, normalised=True)
            gain *= central / local if local else 0.0
            times = (self.aggregate or workers) if self.reduce == "sum" else 1
            yield from stability.synchronous(gain * times, f"the gain of a window of {self.window}")
