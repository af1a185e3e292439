"""SAGN: synchronous accumulated gradient normalisation."""

from dataclasses import dataclass

from paceline import stability
from paceline.rules import SGD, Rule
from paceline.scheme import Count, State, Vector
from paceline.schemes.sync import SyncSGD
from paceline.stability import Gain
from paceline.worker import Worker


@dataclass(frozen=True)
class SAGN(SyncSGD):
    """Synchronous AGN: windows of local steps from the common x; the means of their gradients are averaged.

    The synchronous form of Hermans, Spanakis, Moeckel 2017 (arXiv 1710.02368), after the distributed TensorFlow guides.

    worker:  y, v <- pull();  `window` times: g <- gradient(y);  a <- a + g;  y <- y - lr * g
             push(a / window, v, i)
    server:  when all are here: x <- x - lr * mean over workers;  v <- v + 1

    A window of one is synchronous SGD. `rule` makes the local steps, `server.rule` the update. The server is that of
    `sync`: with `aggregate` fewer than the workers the rest are backup workers.
    """

    server_rule: Rule = SGD()
    window: Count = 5
    family = "local updates"
    good_for = "a slow network and a server rule of its own"
    volume = "2 / window"
    limit = "gain of a window / window < 2"
    equals = "window=1 is sync"

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, next=0, **self.rule.cells(x0))

    @property
    def applied(self) -> Rule:
        return self.server_rule

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull(w.next)
        now = self.rates_at(w.state)  # the rates of the version that was pulled
        local = now.rule.window(w.state, now.lr)
        for _ in range(self.window):
            local.step(await w.grad(w.x))
        await self.push(local.sum / self.window, w.v, w.rank)
        w.next = w.v + 1

    def gradients_per_update(self, workers: int) -> float:
        return super().gradients_per_update(workers) * self.window

    def gain(self, workers: int, curvature: float) -> Gain | None:
        gain = stability.windowed(self, curvature)
        return gain and gain._replace(share=gain.share / self.window * self._times(workers))
