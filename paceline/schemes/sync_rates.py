"""Synchronous SGD in which every worker has a learning rate of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from paceline import stability
from paceline.errors import UsageError
from paceline.scheme import Rate, Vector
from paceline.schemes.sync import SyncSGD
from paceline.worker import Worker


@dataclass(frozen=True)
class SyncRates(SyncSGD):
    """Synchronous SGD with a learning rate per worker.

    From the distributed TensorFlow guides, which scale each gradient before the averaging.

    worker i:  x, v <- pull();  push(rates[i] * gradient(x), v, i)
    server:    when all are here: x <- x - sum of rates[i] * g_i;  v <- v + 1

    Without `rates` everybody has `lr`. `reduce=mean` divides by the number of gradients. Only rules that are linear
    in the gradient make sense: Adagrad and Adam divide the scale out again, and are refused.
    """

    rates: tuple[Rate, ...] = ()
    reduce: Literal["mean", "sum"] = "sum"

    async def gradient(self, w: Worker) -> Vector:
        g = await w.grad(w.x)
        # the server's rule multiplies by lr, for all alike
        return g * (self.rates[w.rank] / self.lr) if self.rates else g

    def check(self, workers: int) -> None:
        super().check(workers)
        if self.rates and len(self.rates) != workers:
            raise UsageError(f"sync-rates: {len(self.rates)} rates for {workers} workers; give one for each")
        if self.rates and (self.lr == 0 or self.rule.lr is not None):
            raise UsageError("sync-rates: rates stand in for lr and rule.lr; leave those away")
        if not self.rule.linear:
            raise UsageError(
                f"sync-rates: the rule {self.rule.name!r} divides the scale of a gradient out, so rates per "
                "worker would do nothing; use sgd, momentum or nesterov"
            )

    def warnings(self, workers: int, curvature: float | None) -> Iterator[str]:
        if curvature is not None:
            rates = self.rates or (self.lr,) * workers
            yield from stability.synchronous(curvature * sum(rates) / (len(rates) if self.reduce == "mean" else 1))
