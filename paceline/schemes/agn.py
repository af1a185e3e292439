"""AGN: accumulated gradient normalisation."""

from dataclasses import dataclass

from paceline.scheme import Count, State, Vector, on_server
from paceline.schemes._windowed import Windowed
from paceline.stability import Gain
from paceline.worker import Worker


@dataclass(frozen=True)
class AGN(Windowed):
    """Accumulated gradient normalisation: local steps, then the mean of their gradients is pushed.

    Hermans, Spanakis, Moeckel 2017 (arXiv 1710.02368); dist-keras calls it ADAG.

    worker:  y, v <- pull();  a <- 0;  `window` times: g <- gradient(y);  a <- a + g;  y <- y - lr * g
             push(a / window, v)
    server:  push: x <- x - lr * a / window;  v <- v + 1

    The authors suggest a window of about (workers + layers) / 2. A window of one is asynchronous SGD.
    """

    window: Count = 12
    family = "asynchronous"
    compresses = ("push.mean",)
    good_for = "uneven devices on a slow network, more stable than downpour-easy"
    volume = "2 / window"
    limit = "gain of a window / window below the limit of async"
    equals = "window=1 is async"

    @on_server
    def push(self, s: State, mean: Vector, v: int) -> None:
        s.admit(v)
        self.server_rule.apply(s, mean, self.lr)
        s.v += 1

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull()
        now = self.rates_at(w.state)  # the rates of the version that was pulled
        local = now.rule.window(w.state, now.lr)
        for _ in range(self.window):
            local.step(await w.grad(w.x))
        await self.push(local.sum / self.window, w.v)

    def gain(self, workers: int, curvature: float) -> Gain | None:
        gain = super().gain(workers, curvature)
        return gain and gain.divided(self.window)
