"""DOWNPOUR SGD: gradients are summed on the worker; it pushes the sum and fetches the centre every few steps."""

from dataclasses import dataclass

import torch

from paceline import stability
from paceline.rules import SGD, Adagrad, Rule
from paceline.scheme import Count, Rate, Scheme, State, Vector, on_server
from paceline.stability import Gain
from paceline.worker import Worker


@dataclass(frozen=True)
class Downpour(Scheme):
    """DOWNPOUR SGD: local steps on an own copy; the sum of their gradients is pushed, the server runs Adagrad.

    Dean et al., Large Scale Distributed Deep Networks, NIPS 2012.

    worker:  if t mod n_fetch = 0: y <- fetch()
             g <- gradient(y);  a <- a + g;  y <- y - lr * g
             if (t + 1) mod n_push = 0: push(a);  a <- 0
    server:  push: x <- x - server.lr * a / sqrt(sum of a^2);  v <- v + 1

    `window` sets n_push and n_fetch together. Differs from the paper: its listing pushes when t mod n_push = 0, so
    that the first push carries one gradient; `paper_schedule=true` does that. Push and fetch wait for their answers.
    Adagrad's first step has length lr in every coordinate, hence the small default; TensorFlow's start of 0.1
    (`server.initial_accumulator_value=0.1`) bears ten times as much.
    """

    lr: Rate = 0.005
    rule: Rule = SGD()
    server_rule: Rule = Adagrad()
    window: Count = 1
    n_push: Count | None = None
    n_fetch: Count | None = None
    paper_schedule: bool = False
    asynchronous = True
    compresses = ("push.a",)
    warnings = stability.asynchronous
    family = "asynchronous"
    good_for = "rare features: the server's Adagrad; fewer messages with a window"
    volume = "1 / (n_push or window) + 1 / (n_fetch or window)"
    limit = "gain of a window below the limit of async"
    equals = "server.rule=sgd, window=1 is async"

    def server(self, x0: Vector, workers: int) -> State:
        return State(x=x0, **self.server_rule.cells(x0))

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, a=torch.zeros_like(x0), **self.rule.cells(x0))

    @on_server(reads=True)
    def fetch(self, s: State) -> tuple[Vector, int]:
        return s.x, s.v

    @on_server
    def push(self, s: State, a: Vector, v: int) -> None:
        s.admit(v)
        self.server_rule.apply(s, a, self.lr)
        s.v += 1

    async def step(self, w: Worker) -> None:
        n_push, n_fetch = self._schedule()
        if w.t % n_fetch == 0:
            w.x, w.v = await self.fetch()
        g = await w.grad(w.x)
        w.a += g
        now = self.rates_at(w.state)  # the rates of the version that was fetched
        now.rule.apply(w.state, g, now.lr)
        if (w.t if self.paper_schedule else w.t + 1) % n_push == 0:
            await self.push(w.a, w.v)
            w.a = 0

    def gradients_per_update(self, workers: int) -> float:
        return self._schedule()[0]

    def gain(self, workers: int, curvature: float) -> Gain | None:
        n_push, n_fetch = self._schedule()
        if n_push != n_fetch or self.rule != SGD() or self.server_rule != SGD():
            return None
        return Gain(stability.window_gain(self.lr * curvature, n_push), f"the gain of a window of {n_push}")

    def _schedule(self) -> tuple[int, int]:
        return self.n_push or self.window, self.n_fetch or self.window
