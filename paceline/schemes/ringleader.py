"""Ringleader ASGD: a table with a mean gradient of every worker; each worker updates once per round."""

from dataclasses import dataclass

import torch

from paceline import stability
from paceline.rules import SGD, Rule
from paceline.scheme import Count, Rate, Scheme, State, Vector, mean_of, on_server
from paceline.worker import Worker


@dataclass(frozen=True)
class Ringleader(Scheme):
    """Ringleader ASGD: an update is the mean over all workers' gradients, and each worker makes one per round.

    Maranjyan, Richtarik, Ringleader ASGD, 2025 (arXiv 2509.22860).

    worker:  x, v <- pull(i);  g <- gradient(x);  push(g, v, i)
    server:  push: phase 1, until every worker has an entry:  G_i <- mean of i's gradients
                   phase 2, from then on:  if i has not updated yet: G_i <- mean with g;  x <- x - lr * mean over all G;
                   v <- v + 1;  else keep g in i's entry of the next table
                   when all have updated: the next table becomes the table, and phase 1 begins

    Staleness is at most 2 * workers - 2. A worker that has died is not waited for, and its entry serves until the end
    of the round. Differs from the paper: a worker with `most` gradients in its entry waits for the others.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    most: Count = 100
    asynchronous = True
    compresses = ("push.g",)
    rule_at_server = True
    waits = "always"
    warnings = stability.asynchronous
    fair = True
    family = "optimal time"
    good_for = "data that differ between workers of different speeds: optimal time with asynchronous updates"
    volume = "2"
    limit = "lr * h below the limit of async with 2 * workers - 1 workers"
    equals = "workers=1 is sgd"

    def server(self, x0: Vector, workers: int) -> State:
        table, flags = torch.zeros(workers, len(x0), dtype=x0.dtype), torch.zeros(workers, dtype=torch.int64)
        return State(
            x=x0,
            now=table,
            count=flags,
            later=table,
            later_count=flags,
            updated=flags,  # in phase 2
            updating=0,  # 1: phase 2
            alive=flags + 1,
            **self.rule.cells(x0),
        )

    def has_room(self, s: State, i: int) -> bool:
        """Whether the table that the next gradient of i goes into takes it."""
        if s.updating:
            return bool(not s.updated[i] or s.later_count[i] < self.most)
        return bool(s.count[i] < self.most)

    @on_server(reads=True, when=lambda self, s, i: self.has_room(s, i))
    def pull(self, s: State, i: int) -> tuple[Vector, int]:
        return s.x, s.v

    @on_server
    def push(self, s: State, g: Vector, v: int, rank: int) -> None:
        s.admit(v)
        if s.updating and s.updated[rank]:
            fold(s.later, s.later_count, rank, g)
            return
        fold(s.now, s.count, rank, g)
        if s.updating:
            self._update(s, rank)
        else:
            self._begin(s, rank)

    def _begin(self, s: State, rank: int) -> None:
        """Begin phase 2 if every living worker has an entry."""
        if s.count.any() and not ((s.alive > 0) & (s.count == 0)).any():
            s.updating, s.updated = 1, 0
            self._update(s, rank)

    def _update(self, s: State, rank: int) -> None:
        self.rule.apply(s, mean_of([s.now[i] for i in range(len(s.count)) if s.count[i]]), self.lr)
        s.v += 1
        s.updated[rank] = 1
        self._end(s)

    def _end(self, s: State) -> None:
        """End phase 2 if every living worker has updated."""
        if not ((s.alive > 0) & (s.updated == 0)).any():
            s.updating = 0
            s.now, s.count = s.later, s.later_count
            s.later_count = 0

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull(w.rank)
        g = await w.grad(w.x)
        await self.push(g, w.v, w.rank)

    def left(self, s: State, rank: int) -> None:
        s.alive[rank] = 0
        if s.updating:
            self._end(s)
        else:
            self._begin(s, rank)

    def joined(self, s: State, rank: int) -> None:
        s.alive[rank] = 1


def fold(table: Vector, count: Vector, i: int, g: Vector) -> None:
    """Put g into the mean of row i."""
    count[i] += 1
    if count[i] == 1:
        table[i] = g
    else:
        table[i] += (g - table[i]) / int(count[i])
