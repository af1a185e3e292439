"""OrMo: momentum in the order in which gradients were due, not in the order in which they come."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from paceline import stability
from paceline.errors import UsageError
from paceline.scheme import Fraction, Rate, Scheme, State, Vector, on_server
from paceline.stability import Gain
from paceline.worker import Worker


@dataclass(frozen=True)
class OrMo(Scheme, name="ormo"):
    """Ordered momentum: a late gradient enters the momentum as if it had come with those of its own round.

    Shi, Yang, Li, Ordered Momentum for Asynchronous SGD, 2024 (arXiv 2407.19234).

    worker:  x, v <- pull();  g <- gradient(x);  push(g, v)
    server:  push, the t-th from 0 on:  b <- max(b, floor(t / workers), ceil(v / workers))
                   each time that b rises by one:  x <- x - momentum * u;  u <- momentum * u
                   l <- b - ceil(v / workers);  u <- u + momentum^l * lr * g
                   x <- x - lr * g * (1 - momentum^(l + 1)) / (1 - momentum);  v <- v + 1

    `adaptive=true` (OrMo-DA) takes lr * workers / max(workers, staleness) for lr. A fast worker's gradient may be of a
    later round than the present one, and begins it. Checked against the paper's abstract, a public summary and the
    captions of its figures: groups of gradients by their iteration, a rate by the delay, the weights momentum^2,
    momentum and 1 of the groups of 4, 4 and 2 gradients after the tenth of 4 workers, and a step that is not the plain
    lr * g. The listing is recalled: of it, the identities below are tested, and what the paper does with a gradient of
    a later round was not checked.
    """

    lr: Rate = 0.01
    momentum: Fraction = 0.9
    adaptive: bool = False
    asynchronous = True
    compresses = ("push.g",)
    family = "bounded or corrected staleness"
    good_for = "momentum with asynchronous workers at the memory of one momentum"
    volume = "2"
    limit = "lr * h / (1 - momentum) below the limit of async, about"
    equals = (
        "momentum=0 is async; workers=1 is sgd with rule=momentum, and in order sync with reduce=sum, up to rounding"
    )

    def server(self, x0: Vector, workers: int) -> State:
        return State(x=x0, u=torch.zeros_like(x0), t=0, b=0, workers=workers)

    @on_server(reads=True)
    def pull(self, s: State) -> tuple[Vector, int]:
        return s.x, s.v

    @on_server
    def push(self, s: State, g: Vector, v: int) -> None:
        staleness, mu, k = s.admit(v), self.momentum, s.workers
        own = -(-v // k)
        while s.b < max(s.t // k, own):
            s.x.add_(s.u, alpha=-mu)
            s.u *= mu
            s.b += 1
        lag = s.b - own
        lr = self.lr * k / max(k, staleness) if self.adaptive else self.lr
        s.u.add_(g, alpha=mu**lag * lr)
        s.x.add_(g, alpha=-lr * sum(mu**j for j in range(lag + 1)))
        s.t += 1
        s.v += 1

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull()
        g = await w.grad(w.x)
        await self.push(g, w.v)

    def gradients_per_update(self, workers: int) -> float:
        return 1

    def check(self, workers: int) -> None:
        if self.momentum >= 1:
            raise UsageError("ormo: momentum must be below 1")

    def gain(self, workers: int, curvature: float) -> Gain | None:
        return Gain(self.lr * curvature / (1 - self.momentum), "lr * curvature / (1 - momentum)")

    def warnings(self, workers: int, curvature: float | None) -> Iterator[str]:
        return stability.asynchronous(self, workers, curvature)
