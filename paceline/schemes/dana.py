"""DANA: momentum for many asynchronous workers; each computes its gradient where x is about to be."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from paceline import stability
from paceline.scheme import Fraction, Rate, Scheme, State, Vector, on_server
from paceline.stability import Gain
from paceline.worker import Worker


@dataclass(frozen=True)
class DANA(Scheme):
    """DANA: a momentum for each worker; a gradient is taken where all of them together will have moved x.

    Hakimi, Barkai, Gabel, Schuster, Taming Momentum in a Distributed Asynchronous Environment, 2019 (arXiv 1907.11612).

    worker:  y, v <- pull();  g <- gradient(y);  push(g, v, i)                                        variant=zero
    server:  push: m_i <- momentum * m_i + g;  x <- x - lr * m_i;  v <- v + 1
             pull: y <- x - lr * momentum * (sum of all m)
    worker:  x, v <- pull();  g <- gradient(x);  m <- momentum * m + g;  push(g + momentum * m, v)    variant=slim
    server:  push: x <- x - lr * (what was pushed);  v <- v + 1

    The two give the same points of gradients while lr is constant; slim (the default) needs no memory at the server,
    and its x is zero's look-ahead. Momentum is in units of a gradient, so a change of lr rescales it by itself.
    """

    lr: Rate = 0.01
    momentum: Fraction = 0.9
    variant: Literal["slim", "zero"] = "slim"
    asynchronous = True
    compresses = ("push.u",)
    family = "bounded or corrected staleness"
    good_for = "momentum with many asynchronous workers"
    volume = "2"
    limit = "lr * h / (1 - momentum) below the limit of async, about"
    equals = "momentum=0 is async; workers=1 is sgd with rule=nesterov; variant=zero and slim, up to rounding"

    def server(self, x0: Vector, workers: int) -> State:
        if self.variant == "slim":
            return State(x=x0)
        return State(x=x0, m=torch.zeros(workers, len(x0), dtype=x0.dtype), total=torch.zeros_like(x0))

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, m=torch.zeros_like(x0)) if self.variant == "slim" else State(x=x0)

    @on_server(reads=True)
    def pull(self, s: State) -> tuple[Vector, int]:
        return s.x, s.v

    @on_server
    def look_ahead(self, s: State) -> tuple[Vector, int]:
        s.lend(s.v)
        return s.x.add(s.total, alpha=-self.lr * self.momentum), s.v

    @on_server
    def push(self, s: State, u: Vector, v: int, i: int) -> None:
        s.admit(v)
        if self.variant == "slim":
            s.x.add_(u, alpha=-self.lr)
        else:
            before = s.m[i].clone()
            s.m[i].mul_(self.momentum).add_(u)
            s.total += s.m[i] - before
            s.x.add_(s.m[i], alpha=-self.lr)
        s.v += 1

    async def step(self, w: Worker) -> None:
        if self.variant == "zero":
            w.x, w.v = await self.look_ahead()
            g = await w.grad(w.x)
            await self.push(g, w.v, w.rank)
            return
        w.x, w.v = await self.pull()
        g = await w.grad(w.x)
        m = w.m.mul(self.momentum).add_(g)
        await self.push(g.add(m, alpha=self.momentum), w.v, w.rank)
        w.m = m

    def gradients_per_update(self, workers: int) -> float:
        return 1

    def gain(self, workers: int, curvature: float) -> Gain | None:
        if self.momentum >= 1:
            return None
        return Gain(self.lr * curvature / (1 - self.momentum), "lr * curvature / (1 - momentum)")

    def warnings(self, workers: int, curvature: float | None) -> Iterator[str]:
        yield from stability.asynchronous(self, workers, curvature)
        if self.momentum >= 1:
            yield "momentum 1 never forgets a gradient: it will diverge"
