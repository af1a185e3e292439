"""Synchronous SGD in which a fast worker gives several gradients to an update."""

from dataclasses import dataclass
from typing import Literal

import torch

from paceline import stability
from paceline.rules import SGD, Rule
from paceline.scheme import Count, Rate, Scheme, State, Vector, on_server, sum_of
from paceline.schemes.sync import in_order
from paceline.stability import Gain
from paceline.worker import Worker


@dataclass(frozen=True)
class SyncRepeat(Scheme):
    """Synchronous SGD with repeated gradients: an update takes `aggregate` of them, several of a fast worker.

    Chen, Monga, Bengio, Jozefowicz, Revisiting Distributed Synchronous SGD, 2016 (arXiv 1604.00981), with more
    gradients per update than workers, as TensorFlow's SyncReplicasOptimizer allows.

    worker:  x, v <- pull(i) once a token is free;  g <- gradient(x);  push(g, v, i)
    server:  pull: i takes a token
             push: if v is old: drop;  keep g;  when `aggregate` are here: x <- x - lr * mean of them;  v <- v + 1;
                   tokens <- max(workers, aggregate)

    aggregate = workers unless given. A worker that dies returns its token. Kept gradients are added in the order of
    ranks, whatever the order of arrival.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    aggregate: Count | None = None
    reduce: Literal["mean", "sum"] = "mean"
    rule_at_server = True
    waits = "sometimes"  # the others may do the share of a worker that is away
    warnings = stability.synchronous
    family = "synchronous"
    compresses = ("push.g",)
    good_for = "more gradients per update than workers, so that fast workers give several"
    volume = "2"
    limit = "lr * h < 2"
    equals = "workers=1, aggregate=1 is sgd"

    def server(self, x0: Vector, workers: int) -> State:
        need = self.aggregate or workers
        return State(
            x=x0,
            need=need,
            present=workers,
            got=0,
            kept=torch.zeros(need, len(x0), dtype=x0.dtype),
            whose=torch.zeros(need, dtype=torch.int64),
            tokens=max(workers, need),  # gradients of this version that may still be started
            holds=torch.zeros(workers, dtype=torch.int64),  # workers that have started one
            **self.rule.cells(x0),
        )

    @on_server(when=lambda self, s, rank: s.tokens > 0 or s.holds[rank] > 0)
    def pull(self, s: State, rank: int) -> tuple[Vector, int]:
        if not s.entry("holds", rank):  # a restarted worker still has its token
            s.tokens -= 1
            s.write("holds", rank, 1)
        return s.x, s.v

    @on_server
    def push(self, s: State, g: Vector, v: int, rank: int) -> None:
        s.write("holds", rank, 0)
        if v < s.v:
            s.refuse()
            return
        s.admit(v)
        if s.got + 1 < s.need:
            s.write("kept", s.got, g)
            s.write("whose", s.got, rank)
            s.got += 1
            return
        gradients = in_order(s, (rank, g))
        self.rule.apply(s, self.combined(gradients) if self.reduce == "mean" else sum_of(gradients), self.lr)
        s.v += 1
        s.got = 0
        s.tokens = max(s.present, s.need)
        s.holds = 0

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull(w.rank)
        g = await w.grad(w.x)
        await self.push(g, w.v, w.rank)

    def left(self, s: State, rank: int) -> None:
        s.present -= 1
        s.tokens += s.entry("holds", rank)
        s.write("holds", rank, 0)

    def joined(self, s: State, rank: int) -> None:
        s.present += 1

    def exact(self, workers: int) -> str:
        return "the fastest workers give more gradients than others, and which ones is chance"

    def gradients_per_update(self, workers: int) -> float:
        return self.aggregate or workers

    def gain(self, workers: int, curvature: float) -> Gain | None:
        gain = super().gain(workers, curvature)
        return gain and gain._replace(share=gain.share * ((self.aggregate or workers) if self.reduce == "sum" else 1))
