"""FedBuff: asynchronous clients, and a buffer of their deltas at the server."""

from dataclasses import dataclass

import torch

from paceline.fields import Natural
from paceline.scheme import Count, Rate, State, Vector, on_server
from paceline.schemes._windowed import Windowed
from paceline.stability import Gain
from paceline.worker import Worker


@dataclass(frozen=True)
class FedBuff(Windowed):
    """FedBuff: clients push when they are ready; the server moves x by the mean of every `buffer` pushes.

    Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, 2021 (arXiv 2106.06639), Algorithm 1.

    worker:  y, v <- pull();  `window` times: g <- gradient(y);  a <- a + g;  y <- y - lr * g;  push(a, v)
    server:  push: b <- b + (1 + staleness)^-power * a
             at `buffer` pushes: x <- x - lr * b / buffer;  v <- v + 1;  b <- 0

    power = 0 weighs all pushes alike; pushes staler than `bound` are refused. A window is in units of a gradient, so
    that server.lr / lr is the server's rate of the paper. The defaults of buffer and power are recalled. Differs from
    the paper: workers are the clients that train at once, and each starts again from the newest x.
    """

    buffer: Count = 10
    power: Rate = 0.5
    bound: Natural | None = None
    family = "local updates"
    compresses = ("push.total",)
    good_for = "many clients of uneven speed: fewer and less stale updates than async"
    volume = "2 / window"
    limit = "gain of a window below the limit of async for (workers - 1) / buffer stale pushes"
    equals = "buffer=1 power=0 window=1 is async"

    def server(self, x0: Vector, workers: int) -> State:
        return State(x=x0, b=torch.zeros_like(x0), got=0, **self.server_rule.cells(x0))

    @on_server
    def push(self, s: State, total: Vector, v: int) -> None:
        if self.bound is not None and s.v - v > self.bound:
            s.refuse()
            return
        s.b += (1 + s.admit(v)) ** -self.power * total
        s.got += 1
        if s.got == self.buffer:
            self.server_rule.apply(s, s.b / self.buffer, self.lr)
            s.v += 1
            s.b = 0
            s.got = 0

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull()
        now = self.rates_at(w.state)  # the rates of the version that was pulled
        local = now.rule.window(w.state, now.lr)
        for _ in range(self.window):
            local.step(await w.grad(w.x))
        await self.push(local.sum, w.v)

    def gradients_per_update(self, workers: int) -> float:
        return self.window * self.buffer

    def gain(self, workers: int, curvature: float) -> Gain | None:
        return super().gain(workers, curvature) if self.buffer == 1 else None
