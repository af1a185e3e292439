"""Malenia SGD: rounds in which every worker's gradients are averaged first, so that all workers count alike."""

from dataclasses import dataclass

import torch

from paceline import stability
from paceline.rules import SGD, Rule
from paceline.scheme import Count, Rate, Scheme, State, Vector, mean_of, on_server
from paceline.worker import Worker


@dataclass(frozen=True)
class Malenia(Scheme):
    """Malenia SGD: gradients at one x until each worker has given enough; the mean of the workers' means is used.

    Tyurin, Richtarik, Optimal Time Complexities of Parallel Stochastic Optimization Methods Under a Fixed Computation
    Model, NeurIPS 2023.

    worker:  x, v <- pull(i);  g <- gradient(x), stopped when version v + 1 is there;  push(g, v, i)
    server:  push: if v is old: drop;  G_i <- G_i + g;  B_i <- B_i + 1
                   when workers / (sum of 1 / B) >= k / workers: x <- x - lr * mean over i of G_i / B_i;  v <- v + 1

    k: the number of workers unless given, which ends a round when every worker has given a gradient; theory takes
    sigma^2 / epsilon. A worker that has died is not waited for; what it gave in this round is used. Differs from the
    paper: a worker that has given `most` gradients to a round waits for the others.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    k: Count | None = None
    most: Count = 100
    rule_at_server = True
    compresses = ("push.g",)
    warnings = stability.synchronous
    family = "optimal time"
    good_for = "data that differ between workers of different speeds, without staleness"
    volume = "2"
    limit = "lr * h < 2"
    equals = "workers=1, k=1 is sgd; equal times are sync"

    def server(self, x0: Vector, workers: int) -> State:
        return State(
            x=x0,
            total=torch.zeros(workers, len(x0), dtype=x0.dtype),
            count=torch.zeros(workers, dtype=torch.int64),
            alive=torch.ones(workers, dtype=torch.int64),
            **self.rule.cells(x0),
        )

    @on_server(reads=True, when=lambda self, s, i: s.count[i] < self.most)
    def pull(self, s: State, i: int) -> tuple[Vector, int]:
        return s.x, s.v

    @on_server
    def push(self, s: State, g: Vector, v: int, rank: int) -> None:
        if v < s.v:
            s.refuse()
            return
        s.admit(v)
        s.total[rank] = s.total[rank] + g if s.count[rank] else g
        s.count[rank] += 1
        self._close(s)

    def _close(self, s: State) -> None:
        """End the round if the workers have given enough."""
        given = s.count > 0
        taking = given | (s.alive > 0)
        number = int(taking.sum())
        if not given.any() or (taking & ~given).any():
            return
        harmonic = number / sum(1 / int(b) for b in s.count[given])
        if harmonic >= min((self.k or number) / number, self.most):
            means = [s.total[i] / int(s.count[i]) for i in range(len(s.count)) if s.count[i]]
            self.rule.apply(s, mean_of(means), self.lr)
            s.v += 1
            s.count = 0

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull(w.rank)
        g = await w.grad(w.x, until=w.v + 1)
        if g is not None:
            await self.push(g, w.v, w.rank)

    def left(self, s: State, rank: int) -> None:
        s.alive[rank] = 0
        self._close(s)

    def joined(self, s: State, rank: int) -> None:
        s.alive[rank] = 1

    def exact(self, workers: int) -> str:
        return "how many gradients a worker gives to a round is chance"
