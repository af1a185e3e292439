"""FedAsync: a worker's model is mixed into the server's, the less the older it is."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from paceline import stability
from paceline.fields import Natural
from paceline.rules import SGD, Rule
from paceline.scheme import Count, Fraction, Rate, Scheme, State, Vector, on_server
from paceline.stability import Gain
from paceline.worker import Worker


@dataclass(frozen=True)
class FedAsync(Scheme):
    """FedAsync: asynchronous federated averaging; each push replaces a share of x by the worker's model.

    Xie, Koyejo, Gupta, Asynchronous Federated Optimization, 2019 (arXiv 1903.03934).

    worker:  y <- x, v <- pull();  `window` times: y <- y - lr * (gradient(y) + rho * (y - x));  push(y, v)
    server:  push: a <- alpha * s(v_now - v);  x <- (1 - a) * x + a * y;  v <- v + 1

    s(tau) is 1 (`weight=constant`), (tau + 1)^-power (`polynomial`) or 1 up to tau = hinge and 1 / (power * (tau -
    hinge) + 1) after it (`hinge`). A push is parameters, not a change: it also pulls x back to where y began. The
    defaults of alpha and power are the authors'; those of window and hinge are ours.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    window: Count = 5
    alpha: Fraction = 0.6
    rho: Rate = 0.0
    weight: Literal["polynomial", "hinge", "constant"] = "polynomial"
    power: Rate = 0.5
    hinge: Natural = 4
    asynchronous = True
    family = "bounded or corrected staleness"
    good_for = "devices that come and go and push whole models, without ever waiting"
    volume = "2 / window"
    limit = "gain of a window below 2; alpha * gain below the limit of async"
    equals = "workers=1, alpha=1, window=1 is sgd, up to rounding"

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, **self.rule.cells(x0))

    @on_server(reads=True)
    def pull(self, s: State) -> tuple[Vector, int]:
        return s.x, s.v

    @on_server
    def push(self, s: State, y: Vector, v: int) -> None:
        s.x.lerp_(y, self.alpha * self.share(s.admit(v)))
        s.v += 1

    def share(self, tau: int) -> float:
        """s(tau)"""
        if self.weight == "polynomial":
            return float((tau + 1) ** -self.power)
        return 1.0 if self.weight == "constant" or tau <= self.hinge else 1 / (self.power * (tau - self.hinge) + 1)

    async def step(self, w: Worker) -> None:
        x, w.v = await self.pull()
        w.x = x
        now = self.rates_at(w.state)  # the rates of the version that was pulled
        for _ in range(self.window):
            g = await w.grad(w.x)
            now.rule.apply(w.state, g.add(w.x - x, alpha=now.rho) if now.rho else g, now.lr)
        await self.push(w.x, w.v)

    def gradients_per_update(self, workers: int) -> float:
        return self.window

    def gain(self, workers: int, curvature: float) -> Gain | None:
        if type(self.rule) is not SGD:
            return None
        share = self.alpha * stability.window_gain(self.rule.rate(self.lr) * curvature, self.window)
        return Gain(share, f"alpha times the gain of a window of {self.window}")

    def warnings(self, workers: int, curvature: float | None) -> Iterator[str]:
        return stability.asynchronous(self, workers, curvature)
