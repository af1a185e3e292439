"""Gap-Aware: a gradient counts less where x has moved by more than usual since the worker pulled it."""

from dataclasses import dataclass

import torch

from paceline import stability
from paceline.errors import UsageError
from paceline.rules import SGD, Rule
from paceline.scheme import Rate, Scheme, State, Vector, on_server
from paceline.worker import Worker

DECAY, EPS = 0.999, 1e-8


@dataclass(frozen=True)
class GapAware(Scheme, name="gap-aware"):
    """Gap-Aware: each number of a gradient is divided by the gap of x there, in units of an average step.

    Barkai, Hakimi, Schuster, Gap-Aware Mitigation of Gradient Staleness, 2019 (arXiv 1909.10802).

    worker:  x, v <- pull(i);  g <- gradient(x);  push(g, v, i)
    server:  pull: x_i <- x
             push: C <- largest lr so far * (sqrt(ema / (1 - 0.999^v)) + eps);  P <- 1 + |x - x_i| / C
                   x <- x - lr * rule(g / P);  ema <- 0.999 * ema + 0.001 * u * u;  v <- v + 1    element by element

    u is the momentum after the push, or g / P without momentum. C, P, 0.999 and eps = 1e-8 were checked against
    public code for pipelines, not against the paper. That one divides the weight decay by P too, which the rule here
    does not; without momentum it averages g * g before the division; and where a gap spans several steps it multiplies
    C by their number. Which of these the paper does was not checked.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    asynchronous = True
    compresses = ("push.g",)
    rule_at_server = True
    warnings = stability.asynchronous
    family = "bounded or corrected staleness"
    good_for = "many workers with momentum, where counted staleness would slow down coordinates that are at rest"
    volume = "2"
    limit = "lr * h below the limit of async, or more: large gaps shrink the step"
    equals = "workers=1 is sgd"

    def server(self, x0: Vector, workers: int) -> State:
        given = torch.zeros(workers, len(x0), dtype=x0.dtype)
        return State(x=x0, given=given, ema=torch.zeros_like(x0), highest=0.0, **self.rule.cells(x0))

    @on_server
    def pull(self, s: State, i: int) -> tuple[Vector, int]:
        s.given[i] = s.x
        return s.x, s.v

    @on_server
    def push(self, s: State, g: Vector, v: int, i: int) -> None:
        s.admit(v)
        s.highest = max(s.highest, self.rule.rate(self.lr))
        usual = (s.ema / (1 - DECAY**s.v)).sqrt() if s.v else s.ema
        step = (s.highest * (usual + EPS)).clamp_min(torch.finfo(g.dtype).tiny)
        g = g / (1 + (s.x - s.given[i]).abs() / step)
        self.rule.apply(s, g, self.lr)
        moved = s.cell(f"{self.rule.name}_buffer") if self.rule.memory else g
        s.ema.lerp_(moved * moved, 1 - DECAY)
        s.v += 1

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull(w.rank)
        g = await w.grad(w.x)
        await self.push(g, w.v, w.rank)

    def gradients_per_update(self, workers: int) -> float:
        return 1

    def check(self, workers: int) -> None:
        if not self.rule.linear:
            raise UsageError(
                f"gap-aware: steps are measured as those of SGD; use sgd, momentum or nesterov, not {self.rule.name!r}"
            )
