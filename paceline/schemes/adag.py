"""ADAG in the form of the author's thesis: staleness measured as distance."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from paceline.scheme import Bound, State, Vector, on_server
from paceline.schemes._windowed import Windowed
from paceline.stability import Gain
from paceline.worker import Worker


@dataclass(frozen=True)
class ADAG(Windowed):
    """ADAG: a push counts less where the centre has moved since the worker pulled it.

    Hermans, On Scalable Deep Learning and Parallelizing Gradient Descent, MSc thesis, Maastricht 2017.

    worker:  y, v <- pull(i);  `window` times: y <- y - lr * g;  push(sum of g, v, i)
    server:  pull: x_i <- x
             push: x <- x - lr * (sum of g) / ((x - x_i)^2 / gamma + 1);  v <- v + 1        element by element

    A large gamma is a plain push. The thesis prints the formula with a norm, its text and code are element-wise: that
    is the default, `distance=norm` gives the other. `normalise=true` pushes the mean of the window (AGN's push).
    """

    gamma: Annotated[float, Bound(1e-300)] = 1e-4
    distance: Literal["element", "norm"] = "element"
    normalise: bool = False
    family = "bounded or corrected staleness"
    compresses = ("push.total",)
    good_for = "staleness measured by how far x has moved, not by counting"
    volume = "2 / window"
    limit = "gain of a window below the limit of async"
    equals = "a large gamma is downpour-easy; normalise=true and a large gamma is agn"

    def server(self, x0: Vector, workers: int) -> State:
        return State(x=x0, given=torch.zeros(workers, len(x0), dtype=x0.dtype), **self.server_rule.cells(x0))

    @on_server
    def pull_as(self, s: State, rank: int) -> tuple[Vector, int]:
        s.given[rank] = s.x
        return s.x, s.v

    @on_server
    def push(self, s: State, total: Vector, v: int, rank: int) -> None:
        s.admit(v)
        moved = s.x - s.given[rank]
        square = moved.square() if self.distance == "element" else moved.square().sum()
        self.server_rule.apply(s, total / (square / self.gamma + 1), self.lr)
        s.v += 1

    def whole(self) -> str | None:
        return "distance=norm needs the length of the whole vector" if self.distance == "norm" else None

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull_as(w.rank)
        now = self.rates_at(w.state)  # the rates of the version that was pulled
        local = now.rule.window(w.state, now.lr)
        for _ in range(self.window):
            local.step(await w.grad(w.x))
        await self.push(local.sum / self.window if self.normalise else local.sum, w.v, w.rank)

    def gain(self, workers: int, curvature: float) -> Gain | None:
        gain = super().gain(workers, curvature)
        return gain and gain.divided(self.window if self.normalise else 1)
