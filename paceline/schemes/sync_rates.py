"""Synchronous SGD in which every worker has its own learning rate."""

from dataclasses import dataclass
from typing import Literal

from paceline.errors import UsageError
from paceline.scheme import Rate
from paceline.schemes.sync import SyncSGD
from paceline.stability import Gain
from paceline.worker import Worker


@dataclass(frozen=True)
class SyncRates(SyncSGD):
    """Synchronous SGD with a learning rate per worker.

    From the distributed TensorFlow guides, which scale each gradient before the averaging.

    worker i:  x, v <- pull();  g <- gradient(x);  push(rates[i] / lr * g, v, i)
    server:    when all are here: x <- x - lr * sum of what was pushed;  v <- v + 1

    So x moves by the sum of rates[i] * g_i. A schedule of lr scales all rates alike: where lr has fallen to a tenth of
    its base, each worker has a tenth of its rate. Without `rates` every worker has `lr`. `reduce=mean` divides by the
    number of gradients. The server is that of `sync`. Its rule must be linear in the gradient: Adagrad and Adam divide
    the scale out again, and are refused.
    """

    rates: tuple[Rate, ...] = ()
    reduce: Literal["mean", "sum"] = "sum"
    family = "synchronous"
    good_for = "workers whose data deserve different weights"
    volume = "2"
    limit = "sum of rates * h < 2"
    equals = "rates all lr and reduce=mean is sync"

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull(w.next)
        g = await w.grad(w.x)
        await self.push(self.rates[w.rank] / float(self.source.lr) * g if self.rates else g, w.v, w.rank)
        w.next = w.v + 1

    def check(self, workers: int) -> None:
        super().check(workers)
        if self.rates and len(self.rates) != workers:
            raise UsageError(f"sync-rates: {len(self.rates)} rates for {workers} workers; give one for each")
        if self.rates and (float(self.lr) == 0 or self.rule.lr is not None):
            raise UsageError("sync-rates: rates replace lr and rule.lr; omit those")
        if not self.rule.linear:
            raise UsageError(
                f"sync-rates: the rule {self.rule.name!r} divides the scale of a gradient out, so rates per "
                "worker would do nothing; use sgd, momentum or nesterov"
            )

    def gain(self, workers: int, curvature: float) -> Gain | None:
        rates = self.rates or (self.lr,) * workers
        return Gain(curvature * sum(rates) / (len(rates) if self.reduce == "mean" else 1))
