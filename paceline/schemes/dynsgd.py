"""DynSGD: a push counts in inverse proportion to its staleness."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from paceline import stability
from paceline.scheme import State, Vector, on_server
from paceline.schemes._windowed import Windowed
from paceline.stability import Gain
from paceline.worker import Worker


@dataclass(frozen=True)
class DynSGD(Windowed):
    """DynSGD: each push is divided by its staleness + 1.

    Jiang, Cui, Zhang, Yu, Heterogeneity-aware Distributed Parameter Servers, SIGMOD 2017, in the form of dist-keras.

    worker:  y, v <- pull();  `window` times: y <- y - lr * g;  push(sum of g, v)
    server:  push: tau <- v_now - v;  x <- x - lr * (sum of g) / (tau + 1);  v <- v + 1

    `weight=constant` is the paper's ConSGD: every push counts 1 / workers. Differs from the paper: no bounded
    staleness under it, and earlier pushes of a version are not revised (that part of the paper was not checked here).
    """

    weight: Literal["staleness", "constant"] = "staleness"
    family = "bounded or corrected staleness"
    compresses = ("push.total",)
    good_for = "very uneven devices: stale pushes count less"
    volume = "2 / window"
    limit = "lr * h / workers below the limit of async, when workers push in turn"
    equals = "workers=1, window=1 is sgd; weight=constant, window=1 is async at lr / workers"

    def server(self, x0: Vector, workers: int) -> State:
        return State(x=x0, workers=workers, **self.server_rule.cells(x0))

    @on_server
    def push(self, s: State, total: Vector, v: int) -> None:
        tau = s.admit(v)
        share = s.workers if self.weight == "constant" else tau + 1
        self.server_rule.apply(s, total / share, self.lr)
        s.v += 1

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull()
        now = self.rates_at(w.state)  # the rates of the version that was pulled
        local = now.rule.window(w.state, now.lr)
        for _ in range(self.window):
            local.step(await w.grad(w.x))
        await self.push(local.sum, w.v)

    def gain(self, workers: int, curvature: float) -> Gain | None:
        gain = super().gain(workers, curvature)  # workers in turn settle at staleness workers - 1
        return gain and Gain(gain.share / workers, f"the settled gain of a window of {self.window}")

    def warnings(self, workers: int, curvature: float | None) -> Iterator[str]:
        yield from stability.asynchronous(self, workers, curvature)
        if self.weight == "staleness" and self.window > 1 and workers > 8:
            yield (
                f"window {self.window} with {workers} workers: a push of staleness 0 moves x by the whole window, and "
                "the weights 1 / (staleness + 1) do not bound it"
            )
