"""Synchronous SGD with a parameter server: all of them, the first few, or several batches each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from paceline import stability
from paceline.errors import UsageError
from paceline.rules import SGD, Rule
from paceline.scheme import Count, Rate, Scheme, State, Vector, mean_of, on_server, sum_of
from paceline.worker import Worker


@dataclass(frozen=True)
class SyncSGD(Scheme):
    """Synchronous SGD: the first `aggregate` gradients of a version make the next one; later ones are dropped.

    Chen, Monga, Bengio, Jozefowicz, Revisiting Distributed Synchronous SGD, 2016 (arXiv 1604.00981).

    worker:  x, v <- pull() once version v is open;  g <- gradient(x);  push(g, v, i)
    server:  push: if v is old: drop;  keep g;  when `aggregate` are here: x <- x - lr * mean of them;  v <- v + 1

    aggregate = workers (the default) waits for all; fewer leaves the rest as backup workers; more (with `repeat`)
    takes several batches of a worker per update. Without `repeat` a version takes at most one gradient of each
    worker. Kept gradients are added in the order of ranks, whatever the order of arrival. Differs from TensorFlow's
    SyncReplicasOptimizer: a worker that was late pulls the newest version, it holds no token of an old one.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    aggregate: Count | None = None
    repeat: bool = False
    barrier: bool = True
    reduce: Literal["mean", "sum"] = "mean"
    rule_at_server = True

    def server(self, x0: Vector, workers: int) -> State:
        need = self.aggregate or workers
        return State(
            x=x0,
            need=need,
            got=0,
            kept=torch.zeros(need, len(x0), dtype=x0.dtype),
            whose=torch.zeros(need, dtype=torch.int64),
            latest=torch.full((workers,), -1),  # the last version that has a gradient of this worker
            tokens=max(workers, need),  # with `repeat`: gradients of this version that may still be begun,
            holds=torch.zeros(workers, dtype=torch.int64),  # and who has begun one
            present=workers,
            arrived=torch.zeros(workers, dtype=torch.int64),
            **self._centre_rule().cells(x0),
        )

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, next=0)

    @on_server
    def arrive(self, s: State, rank: int) -> None:
        s.arrived[rank] = 1

    @on_server(when=lambda self, s: int(s.arrived.sum()) >= s.present)
    def begin(self, s: State) -> None:
        """The start barrier: nobody computes before everybody is here."""

    @on_server(reads=True, when=lambda self, s, r: s.v >= r)
    def pull(self, s: State, r: int) -> tuple[Vector, int]:
        return s.x, s.v

    @on_server(when=lambda self, s, rank: s.tokens > 0 or s.holds[rank] > 0)
    def begin_another(self, s: State, rank: int) -> tuple[Vector, int]:
        """With `repeat`: a version may be pulled as often as it wants gradients."""
        if not s.holds[rank]:  # a restarted worker still has its token
            s.tokens -= 1
            s.holds[rank] = 1
        return s.x, s.v

    @on_server
    def push(self, s: State, g: Vector, v: int, rank: int) -> None:
        if self.repeat:
            s.holds[rank] = 0
        if v < s.v or (not self.repeat and s.latest[rank] == v):
            s.refuse()
            return
        s.admit(v)
        s.latest[rank] = v
        if s.got + 1 < s.need:
            s.kept[s.got] = g
            s.whose[s.got] = rank
            s.got += 1
        else:
            self._close(s, [(rank, g)])

    async def step(self, w: Worker) -> None:
        if self.barrier and w.t == 0:
            await self.arrive(w.rank)
            await self.begin()
        w.x, w.v = await (self.begin_another(w.rank) if self.repeat else self.pull(w.next))
        g = await self.gradient(w)
        await self.push(g, w.v, w.rank)
        w.next = w.v + 1

    async def gradient(self, w: Worker) -> Vector:
        """What a worker contributes to a version."""
        return await w.grad(w.x)

    def left(self, s: State, rank: int) -> None:
        s.arrived[rank] = 0
        s.present -= 1
        s.tokens += int(s.holds[rank])
        s.holds[rank] = 0
        if not self.repeat and 0 < s.present < s.need:
            s.need = s.present
        if s.got >= s.need:
            self._close(s, [])

    def joined(self, s: State, rank: int) -> None:
        s.arrived[rank] = 1
        s.present += 1
        s.need = min(len(s.whose), s.present) if not self.repeat else s.need

    def _close(self, s: State, last: list[tuple[int, Vector]]) -> None:
        """The version has its gradients: those that are kept, and the last one, which needs no keeping."""
        all_of_them = [*zip(s.whose[: s.got].tolist(), s.kept[: s.got], strict=True), *last]
        in_order = [g for _, g in sorted(all_of_them, key=lambda pair: pair[0])]
        reduced = (mean_of if self.reduce == "mean" else sum_of)(in_order)
        self._centre_rule().apply(s, reduced, self.lr)
        s.v += 1
        s.got = 0
        s.tokens = max(s.present, s.need)
        s.holds = 0

    def _centre_rule(self) -> Rule:
        return self.rule

    def exact(self, workers: int) -> str | None:
        if self.repeat:
            return "with repeat=true the fastest give more gradients than others"
        if self.aggregate not in (None, workers):
            return f"which {self.aggregate} of {workers} gradients come first is chance; leave aggregate away"
        return None

    def check(self, workers: int) -> None:
        if self.aggregate and self.aggregate > workers and not self.repeat:
            raise UsageError(
                f"{self.name}: aggregate is {self.aggregate}, but {workers} workers give one gradient each per update; "
                "add repeat=true to let a worker give several, or lower aggregate"
            )

    def warnings(self, workers: int, curvature: float | None) -> Iterator[str]:
        if curvature is not None and type(self.rule) is SGD:
            times = (self.aggregate or workers) if self.reduce == "sum" else 1
            yield from stability.synchronous(self.rule.rate(self.lr) * curvature * times)
