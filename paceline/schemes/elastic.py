"""Elastic averaging: each worker trains on its own, an elastic force pulls it and the centre together."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from paceline import stability
from paceline.errors import UsageError
from paceline.rules import SGD, Rule
from paceline.scheme import Count, Fraction, Rate, Scheme, State, Vector, on_server
from paceline.worker import Worker


@dataclass(frozen=True)
class EASGD(Scheme, name="easgd"):
    """Synchronous elastic averaging SGD.

    Zhang, Choromanska, LeCun 2015 (arXiv 1412.6651), equations 5 and 6; alpha = beta / workers unless given.

    worker:  g <- gradient(y)
             if t mod window = 0:  y <- y - lr * g - alpha * (y - x);  x <- x + workers * alpha * (mean of old y - x)
             else:                 y <- y - lr * g

    Every worker keeps the centre x and changes it alike, by an all-reduce of y. What is evaluated is the centre.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    beta: Rate = 0.9
    alpha: Rate | None = None
    window: Count = 1
    fixed_order = True
    family = "elastic averaging"
    good_for = "exploring several basins with synchronous workers"
    volume = "2 / window"
    limit = "beta < (4 - 2 lr h) / (2 (1 + 1 / workers) - lr h)"
    equals = "alpha=0 is sgd on each worker, the centre at rest"

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, centre=x0, **self.rule.cells(x0))

    async def step(self, w: Worker) -> None:
        g = await w.grad(w.x)
        if w.t % self.window:
            self.rule.apply(w.state, g, self.lr)
            return
        mean = await w.mean(w.x)
        alpha = moving_rate(self.alpha, self.beta, w.workers)
        e = alpha * (w.x - w.centre)
        self.rule.apply(w.state, g, self.lr)
        w.x -= e
        w.centre += w.workers * alpha * (mean - w.centre)
        w.v += 1

    def gradients_per_update(self, workers: int) -> float:
        return workers * self.window

    def updates_at_start(self, workers: int) -> int:
        return 1 if self.window > 1 else 0  # the step of the first exchange takes one gradient of a window

    def model(self, s: State) -> Vector:
        centre: Vector = s.centre
        return centre

    def check(self, workers: int) -> None:
        beta = moving_rate(self.alpha, self.beta, workers) * workers
        if beta >= 2:
            raise UsageError(f"easgd: beta = workers * alpha = {beta:g} diverges; it must be below 2 (0.9 is usual)")

    def warnings(self, workers: int, curvature: float | None) -> Iterator[str]:
        beta = moving_rate(self.alpha, self.beta, workers) * workers
        yield from stability.synchronous(self, workers, curvature)
        if curvature is not None and type(self.rule) is SGD:
            c = self.rule.rate(self.lr) * curvature
            if c < 2 and beta >= (limit := stability.easgd_beta(c, workers)):
                yield f"beta = {beta:.3g} crosses {limit:.3g}, the stability limit of easgd at lr * curvature = {c:.3g}"
                return
        if beta > 1:
            yield f"beta = {beta:.3g} is above 1: the centre overshoots the workers' mean (0.9 is usual)"


@dataclass(frozen=True)
class AEASGD(Scheme, name="aeasgd"):
    """Asynchronous elastic averaging SGD.

    Zhang, Choromanska, LeCun 2015 (arXiv 1412.6651), Algorithm 1; alpha = beta / workers unless given.

    worker:  z <- y
             if t mod window = 0:  e <- exchange(z);  y <- y - e
             y <- y - lr * gradient(z)
    server:  exchange: e <- alpha * (z - x);  x <- x + e;  v <- v + 1

    `order=sequential` takes the gradient at y after the elastic move, as dist-keras and the thesis do. The exchange
    is atomic: it conserves x + y. Staleness counts the centre's changes since the worker's last exchange.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    beta: Rate = 0.9
    alpha: Rate | None = None
    window: Count = 10
    order: Literal["paper", "sequential"] = "paper"
    asynchronous = True
    family = "elastic averaging"
    good_for = "uneven devices on a slow network that explore on their own"
    volume = "2 / window"
    limit = "alpha <= (4 - 2 lr h) / (4 - lr h)"
    equals = "alpha=0 is sgd on each worker, the centre at rest"

    def server(self, x0: Vector, workers: int) -> State:
        return State(x=x0, alpha=moving_rate(self.alpha, self.beta, workers))

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, **self.rule.cells(x0))

    @on_server
    def exchange(self, s: State, z: Vector, v: int) -> tuple[Vector, int]:
        s.admit(v)
        e = s.alpha * (z - s.x)
        s.x += e
        s.v += 1
        s.lend(s.v)
        return e, s.v

    async def step(self, w: Worker) -> None:
        g = await w.grad(await self.moved(w))
        now = self.rates_at(w.state)  # the rates of the version that the exchange left
        now.rule.apply(w.state, g, now.lr)

    async def moved(self, w: Worker) -> Vector:
        """Move by the spring if a window begins, and give the point of the next gradient."""
        y: Vector = w.x
        if w.t % self.window:
            return y
        z = y.clone()
        e, w.v = await self.exchange(z, w.v)
        w.x -= e
        return z if self.order == "paper" else w.x

    def gradients_per_update(self, workers: int) -> float:
        return self.window

    def updates_at_start(self, workers: int) -> int:
        return workers  # a window begins with its exchange

    def warnings(self, workers: int, curvature: float | None) -> Iterator[str]:
        alpha = moving_rate(self.alpha, self.beta, workers)
        yield from stability.synchronous(self, workers, curvature)
        if curvature is not None and type(self.rule) is SGD:
            c = self.rule.rate(self.lr) * curvature
            if c < 2 and alpha > (limit := stability.aeasgd_alpha(c)):
                yield f"alpha = {alpha:.3g} crosses {limit:.3g}, the stability limit at lr * curvature = {c:.3g}"
        elif alpha > 1:
            yield f"alpha = {alpha:.3g} is above 1: an exchange moves worker and centre past each other"


@dataclass(frozen=True)
class AEAMSGD(AEASGD, name="aeamsgd"):
    """Asynchronous elastic averaging with Nesterov momentum on each worker (EAMSGD).

    Zhang, Choromanska, LeCun 2015 (arXiv 1412.6651), Algorithm 2.

    worker:  z <- y
             if t mod window = 0:  e <- exchange(z);  y <- y - e
             m <- delta * m - lr * gradient(z + delta * m);  y <- y + m
    server:  as aeasgd

    delta = 0 is aeasgd. The momentum is the rule: `rule` stays sgd.
    """

    lr: Rate = 0.01
    delta: Fraction = 0.99
    family = "elastic averaging"
    good_for = "as aeasgd, with momentum on each worker"
    volume = "2 / window"
    limit = "as aeasgd at a rate of lr / (1 - delta), about"
    equals = "delta=0 is aeasgd"

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, m=torch.zeros_like(x0))

    async def step(self, w: Worker) -> None:
        w.m *= self.delta
        ahead = await self.moved(w) + w.m
        g = await w.grad(ahead)
        w.x += w.m  # y + m in two parts, so that delta = 0 leaves aeasgd's arithmetic
        now = self.rates_at(w.state)
        now.rule.apply(w.state, g, now.lr)
        w.m -= torch.mul(g, now.rule.rate(now.lr), out=ahead)

    def check(self, workers: int) -> None:
        if type(self.rule) is not SGD:
            raise UsageError(f"aeamsgd has its own momentum (delta); its rule is sgd, not {self.rule.name!r}")


def moving_rate(alpha: float | None, beta: float, workers: int) -> float:
    """The papers give beta = workers * alpha."""
    return beta / workers if alpha is None else alpha
