"""DC-ASGD: a stale gradient is corrected by an estimate of how the gradient has changed since."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from paceline import stability
from paceline.rules import SGD, Rule
from paceline.scheme import Fraction, Rate, Scheme, State, Vector, on_server
from paceline.worker import Worker


@dataclass(frozen=True)
class DCASGD(Scheme, name="dc-asgd"):
    """Delay-compensated asynchronous SGD: g + lam * g * g * (x - x_i) stands for the gradient at the present x.

    Zheng et al., Asynchronous Stochastic Gradient Descent with Delay Compensation, 2016 (arXiv 1609.08326).

    worker:  x, v <- pull(i);  g <- gradient(x);  push(g, v, i)
    server:  pull: x_i <- x
             push: x <- x - lr * (g + lam * g * g * (x - x_i));  v <- v + 1        element by element

    `adaptive=true` (the paper's DC-ASGD-a) takes lam / sqrt(ms + 1e-7) for lam, with ms <- decay * ms + (1 - decay) *
    g * g first; use lam=2 and decay=0.95 there. The server keeps a copy of x for every worker. Both forms and 1e-7 were
    checked against the authors' code (the updaters of Microsoft's Multiverso), the values against public code: 0.04 is
    that of DCASGD in Apache MXNet, 2 and 0.95 are those of torch_scala. Differs from the authors' code: it keeps an ms
    for each worker; here there is one, of all gradients.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    lam: Rate = 0.04
    adaptive: bool = False
    decay: Fraction = 0.95
    asynchronous = True
    compresses = ("push.g",)
    rule_at_server = True
    family = "bounded or corrected staleness"
    good_for = "moderate staleness, where memory for a copy of x per worker is no matter"
    volume = "2"
    limit = "as async where lam * g * g is near the curvature; large early gradients cross it: adaptive=true"
    equals = "lam=0 is async; workers=1 is sgd"

    def server(self, x0: Vector, workers: int) -> State:
        given = torch.zeros(workers, len(x0), dtype=x0.dtype)
        return State(x=x0, given=given, ms=torch.zeros_like(x0), **self.rule.cells(x0))

    @on_server
    def pull(self, s: State, i: int) -> tuple[Vector, int]:
        s.given[i] = s.x
        return s.x, s.v

    @on_server
    def push(self, s: State, g: Vector, v: int, i: int) -> None:
        s.admit(v)
        square = g * g
        s.ms.lerp_(square, 1 - self.decay)
        lam = self.lam / (s.ms + 1e-7).sqrt() if self.adaptive else self.lam
        self.rule.apply(s, g + lam * square * (s.x - s.given[i]), self.lr)
        s.v += 1

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull(w.rank)
        g = await w.grad(w.x)
        await self.push(g, w.v, w.rank)

    def gradients_per_update(self, workers: int) -> float:
        return 1

    def warnings(self, workers: int, curvature: float | None) -> Iterator[str]:
        yield from stability.asynchronous(self, workers, curvature)
        if not self.adaptive and self.lam > 1:
            yield (
                f"lam = {self.lam:g} without adaptive=true: the correction diverges where lam * g * g is a few "
                "times the curvature, as it is for large early gradients"
            )
