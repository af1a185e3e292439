"""ACE: every update is the mean of all workers' latest gradients."""

from dataclasses import dataclass

import torch

from paceline import stability
from paceline.rules import SGD, Rule
from paceline.scheme import Rate, Scheme, State, Vector, mean_of, on_server
from paceline.worker import Worker


@dataclass(frozen=True)
class ACE(Scheme):
    """ACE: all-client engagement; the server steps along the mean of the latest gradient of each worker.

    ACE, 2025 (arXiv 2511.19066); IA2SGD in the homogeneous literature.

    worker:  x, v <- pull(i);  g <- gradient(x);  push(g, v, i)
    server:  push: until every worker has an entry: G_i <- g;  then u <- mean of G;  x <- x - lr * u;  v <- v + 1
                   afterwards: u <- u + (g - G_i) / workers;  G_i <- g;  x <- x - lr * u;  v <- v + 1

    The table is filled at the first x. Differs from the paper: a worker that is early there waits until it is full; the
    entry of a worker that has died is removed, and comes back with its next push.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    asynchronous = True
    compresses = ("push.g",)
    waits = "sometimes"  # at first
    rule_at_server = True
    warnings = stability.asynchronous
    fair = True
    family = "optimal time"
    good_for = "data that differ between workers of different speeds: every update counts all workers alike"
    volume = "2"
    limit = "lr * h below the limit of async, about"
    equals = "workers=1 is sgd, up to rounding"

    def server(self, x0: Vector, workers: int) -> State:
        filled = torch.zeros(workers, dtype=torch.int64)
        table = torch.zeros(workers, len(x0), dtype=x0.dtype)
        return State(
            x=x0, table=table, filled=filled, u=torch.zeros_like(x0), full=0, alive=filled + 1, **self.rule.cells(x0)
        )

    @on_server(reads=True, when=lambda self, s, i: s.full or not s.filled[i])
    def pull(self, s: State, i: int) -> tuple[Vector, int]:
        return s.x, s.v

    @on_server
    def push(self, s: State, g: Vector, v: int, rank: int) -> None:
        s.admit(v)
        known = s.filled[rank]
        s.filled[rank] = 1
        number = int(s.filled.sum())
        if not s.full:
            s.table[rank] = g
            self._begin(s)
            return
        s.u += (g - (s.table[rank] if known else s.u)) / number
        s.table[rank] = g
        self._update(s)

    def _begin(self, s: State) -> None:
        """Make the first update if every living worker has an entry."""
        if s.filled.any() and not ((s.alive > 0) & (s.filled == 0)).any():
            s.full = 1
            self._recount(s)
            self._update(s)

    def _recount(self, s: State) -> None:
        s.u = mean_of([s.table[i] for i in range(len(s.filled)) if s.filled[i]])

    def _update(self, s: State) -> None:
        self.rule.apply(s, s.u, self.lr)
        s.v += 1

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull(w.rank)
        g = await w.grad(w.x)
        await self.push(g, w.v, w.rank)

    def left(self, s: State, rank: int) -> None:
        s.alive[rank] = 0
        if not s.full:
            self._begin(s)
        elif s.filled[rank] and s.filled.sum() > 1:
            s.filled[rank] = 0
            self._recount(s)

    def joined(self, s: State, rank: int) -> None:
        s.alive[rank] = 1
