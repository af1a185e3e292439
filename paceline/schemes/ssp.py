"""SSP, stale synchronous parallel: no worker is more than a bound of iterations ahead of the slowest."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from paceline import stability
from paceline.errors import UsageError
from paceline.fields import Natural
from paceline.rules import SGD, Rule
from paceline.scheme import Rate, Scheme, State, Vector, on_server
from paceline.worker import Worker


@dataclass(frozen=True)
class SSP(Scheme, name="ssp"):
    """Stale synchronous parallel: a worker begins an iteration if the slowest is at most `bound` behind.

    Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013.

    worker:  x, v, c, least <- pull(i) once c_i - min of all c <= bound;  g <- gradient(x);  push(g, v, i)
    server:  push: x <- x - lr * g;  v <- v + 1;  c_i <- c_i + 1

    Every push is added in full: lr / workers compares with `sync` at lr. bound=none never waits. `read=lazy` is the
    worst case that the bound allows: a worker computes at its old copy, changed by its own gradients only, until the
    guarantee (all pushes of clocks up to c - bound - 1 are in it) would fail. A worker that returns gets the clock of
    the slowest. Differs from the paper: one table, read as a whole.
    """

    lr: Rate = 0.05
    rule: Rule = SGD()
    bound: Natural | None = 3
    read: Literal["eager", "lazy"] = "eager"
    asynchronous = True
    compresses = ("push.g",)
    rule_at_server = True
    waits = "sometimes"
    family = "bounded or corrected staleness"
    good_for = "stragglers that come and go: differences within the bound cost nothing, larger ones stop the others"
    volume = "2"
    limit = "lr * h < 2 sin(pi / (2 (2 d + 1))) with d = (2 bound + 1) (workers - 1) at worst"
    equals = "bound=0 is sync at lr * workers, up to rounding; bound=none is async"

    def server(self, x0: Vector, workers: int) -> State:
        clock, alive = torch.zeros(workers, dtype=torch.int64), torch.ones(workers, dtype=torch.int64)
        return State(x=x0, clock=clock, alive=alive, **self.rule.cells(x0))

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, clock=0, seen=-1)  # seen: the slowest clock when x was pulled; -1: x is not to be used

    def slowest(self, s: State) -> int:
        living = s.clock[s.alive > 0]
        return int((living if len(living) else s.clock).min())

    @on_server(reads=True, when=lambda self, s, i: self.bound is None or s.clock[i] - self.slowest(s) <= self.bound)
    def pull(self, s: State, i: int) -> tuple[Vector, int, int, int]:
        return s.x, s.v, int(s.clock[i]), self.slowest(s)

    @on_server
    def push(self, s: State, g: Vector, v: int, i: int) -> None:
        s.admit(v)
        self.rule.apply(s, g, self.lr)
        s.v += 1
        s.clock[i] += 1

    async def step(self, w: Worker) -> None:
        behind = self.bound is not None and w.seen < w.clock - self.bound
        if self.read == "eager" or w.seen < 0 or behind:
            w.x, w.v, w.clock, w.seen = await self.pull(w.rank)
        g = await w.grad(w.x)
        seen, w.seen = w.seen, -1  # a worker that dies here pulls when it is back
        await self.push(g, w.v, w.rank)
        if self.read == "lazy":
            SGD().apply(w.state, g, self.rule.rate(self.rates_at(w.state).lr))
            w.clock += 1
            w.seen = seen

    def left(self, s: State, rank: int) -> None:
        s.alive[rank] = 0

    def joined(self, s: State, rank: int) -> None:
        s.clock[rank] = max(int(s.clock[rank]), self.slowest(s))
        s.alive[rank] = 1

    def check(self, workers: int) -> None:
        if self.read == "lazy" and type(self.rule) is not SGD:
            raise UsageError(
                f"ssp: read=lazy adds a worker's own pushes to its copy, which the rule {self.rule.name!r} does not "
                "allow; use sgd, or read=eager"
            )

    def gradients_per_update(self, workers: int) -> float:
        return 1

    def warnings(self, workers: int, curvature: float | None) -> Iterator[str]:
        yield from stability.asynchronous(self, workers, curvature)
        gain = None if curvature is None else self.gain(workers, curvature)
        if gain is None or self.bound is None or workers == 1:
            return
        worst = (2 * self.bound + 1) * (workers - 1)
        if stability.constant_delay(worst) <= gain.share < stability.constant_delay(workers - 1):
            yield (
                f"{gain.what} = {gain.share:.3g} crosses {stability.constant_delay(worst):.3g}, the limit at the "
                f"{worst} missing updates that bound {self.bound} allows at worst: stable as long as workers are even"
            )
