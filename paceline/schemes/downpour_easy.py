"""DOWNPOUR with the same plain rule on both sides."""

from dataclasses import dataclass

from paceline.scheme import State, Vector, on_server
from paceline.schemes._windowed import Windowed
from paceline.worker import Worker


@dataclass(frozen=True)
class DownpourEasy(Windowed):
    """DOWNPOUR-Easy: DOWNPOUR with SGD at one rate on both sides, so a push moves x as far as the worker moved.

    Dean et al., NIPS 2012, in the simple form of the distributed TensorFlow guides.

    worker:  y, v <- pull();  `window` times: y <- y - lr * g;  push(sum of g, v)
    server:  push: x <- x - lr * sum of g;  v <- v + 1

    A window of one is asynchronous SGD. Differs from the usual listing only in rounding: it pushes y_end -
    y_start.
    """

    family = "asynchronous"
    compresses = ("push.total",)
    good_for = "uneven devices on a slow network"
    volume = "2 / window"
    limit = "gain of a window below the limit of async"
    equals = "window=1 is async"

    @on_server
    def push(self, s: State, total: Vector, v: int) -> None:
        s.admit(v)
        self.server_rule.apply(s, total, self.lr)
        s.v += 1

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull()
        now = self.rates_at(w.state)  # the rates of the version that was pulled
        local = now.rule.window(w.state, now.lr)
        for _ in range(self.window):
            local.step(await w.grad(w.x))
        await self.push(local.sum, w.v)
