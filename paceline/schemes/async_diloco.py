"""Asynchronous DiLoCo: delayed Nesterov momentum at the server, windows by the workers' speed, a grace period."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from paceline.errors import UsageError
from paceline.rules import AdamW, Rule
from paceline.scheme import Count, Fraction, Rate, Scheme, State, Vector, on_server
from paceline.schemes._delayed_nesterov import delayed_nesterov
from paceline.worker import Worker


@dataclass(frozen=True)
class AsyncDiLoCo(Scheme):
    """Asynchronous DiLoCo: each worker pushes its delta when its window ends; the momentum moves every n-th push.

    Liu et al., Asynchronous Local-SGD Training for Language Modeling, 2024 (arXiv 2401.09135), Algorithms 2 to 4.

    worker:  y, v, h <- pull(i);  h times: y <- y - lr * rule(gradient(y));  push(x - y, v, h, i)
    server:  push: p <- (1 + staleness)^-power * p;  b <- b + p;  c <- activation
             n-th push:  m <- momentum * m + b / n;  x <- x - outer_lr * ((1 - c n + c) * momentum * m + p / n);  b <- 0
             others:     x <- x - outer_lr * (c * momentum * m + p / n);  v <- v + 1
             pull: h <- `window`;  dynamic: window * speed of i / highest speed, at least 1

    n is `buffer`, or the number of workers. buffer=1 is Nesterov momentum on every push: it needs a tenth of the rate.
    `dynamic` makes windows end at about the same time: the `paces` of the workers are given, or else measured by the
    gradients that the server has had of each. With `grace` the first worker to push waits for some seconds, and those
    that push meanwhile wait with it: they start again from the same x. Differs from the paper: workers have no shards
    of data to choose from, and speeds are measured without a clock, so that a run can be replayed.
    """

    lr: Rate = 4e-4
    rule: Rule = AdamW(weight_decay=0.1)
    window: Count = 50
    outer_lr: Rate = 0.7
    momentum: Fraction = 0.9
    buffer: Count | None = None
    activation: Fraction = 0.0
    power: Rate = 0.0
    dynamic: bool = False
    paces: tuple[Rate, ...] = ()
    grace: Rate = 0.0
    asynchronous = True
    compresses = ("push.p",)
    family = "local updates"
    good_for = "language models on uneven devices over slow links"
    volume = "2 / window"
    limit = "with buffer=1 the outer momentum moves x outer_lr / (1 - momentum) as far per push in the long run"
    equals = "buffer=1 with one worker is diloco, up to rounding"

    def server(self, x0: Vector, workers: int) -> State:
        zero = torch.zeros_like(x0)
        done = torch.zeros(workers, dtype=torch.int64)  # gradients of each worker
        return State(x=x0, m=zero, b=zero, got=0, n=self.buffer or workers, done=done, gathering=0, opener=-1)

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, next=0, **self.rule.cells(x0))

    @on_server(reads=True, when=lambda self, s, rank, r: s.gathering >= r)
    def pull(self, s: State, rank: int, r: int) -> tuple[Vector, int, int]:
        return s.x, s.v, self._steps(s, rank)

    def _steps(self, s: State, rank: int) -> int:
        if not self.dynamic:
            return self.window
        speeds = self.paces or s.done.tolist()
        highest = max(speeds)
        return max(1, int(self.window * speeds[rank] / highest)) if highest else self.window

    @on_server
    def push(self, s: State, p: Vector, v: int, steps: int, rank: int) -> None:
        p = (1 + s.admit(v)) ** -self.power * p
        s.done[rank] += steps
        s.got += 1
        how = {"lr": self.outer_lr, "momentum": self.momentum, "activation": self.activation}
        delayed_nesterov(s.x, s.m, s.b, p, last=s.got % s.n == 0, n=s.n, **how)
        s.v += 1

    @on_server
    def gather(self, s: State, rank: int) -> tuple[int, bool]:
        """The number of the gathering that a worker is in, and whether it opened it."""
        if s.opener < 0:
            s.opener = rank
        return s.gathering, s.opener == rank

    @on_server
    def close(self, s: State, gathering: int) -> None:
        if s.gathering == gathering:
            s.gathering += 1
            s.opener = -1

    async def step(self, w: Worker) -> None:
        w.x, w.v, steps = await self.pull(w.rank, w.next)
        now = self.rates_at(w.state)  # the rates of the version that was pulled
        x = w.x.clone()
        for _ in range(steps):
            now.rule.apply(w.state, await w.grad(w.x), now.lr)
        await self.push(x - w.x, w.v, steps, w.rank)
        if self.grace:
            gathering, first = await self.gather(w.rank)
            if first:
                await w.sleep(self.grace)
                await self.close(gathering)
            w.next = gathering + 1

    def left(self, s: State, rank: int) -> None:
        if s.opener == rank:  # nobody else would close it
            s.gathering += 1
            s.opener = -1

    def joined(self, s: State, rank: int) -> None:
        s.done = 0  # speeds are measured from now: a worker that was away would look slow

    def check(self, workers: int) -> None:
        if self.activation * (self.buffer or workers) > 1:
            raise UsageError(f"async-diloco: activation is at most 1 / n, here {1 / (self.buffer or workers):g}")
        if self.paces and (len(self.paces) != workers or not all(self.paces)):
            raise UsageError(f"async-diloco: paces needs {workers} numbers above 0, one for each worker")
        if self.paces and not self.dynamic:
            raise UsageError("async-diloco: paces are for dynamic=true")

    def warnings(self, workers: int, curvature: float | None) -> Iterator[str]:
        reach = self.outer_lr / (1 - self.momentum) if self.momentum < 1 else float("inf")
        if self.buffer == 1 and workers > 1 and reach > 1:
            yield (
                f"outer momentum on every push moves x {reach:.3g} times as far as each delta in the long run, with "
                f"{workers} workers: omit buffer, or use a tenth of outer_lr"
            )

    def gradients_per_update(self, workers: int) -> float | None:
        return None if self.dynamic else self.window
