"""Synchronous SGD with a parameter server: the first gradients of a version make the next one."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from paceline import stability
from paceline.errors import UsageError
from paceline.rules import SGD, Rule
from paceline.scheme import Count, Rate, Scheme, State, Vector, on_server, sum_of
from paceline.stability import Gain
from paceline.worker import Worker


@dataclass(frozen=True)
class SyncSGD(Scheme):
    """Synchronous SGD: the first `aggregate` gradients of a version make the next one; later ones are dropped.

    Chen, Monga, Bengio, Jozefowicz, Revisiting Distributed Synchronous SGD, 2016 (arXiv 1604.00981).

    worker:  x, v <- pull() once version v is open;  g <- gradient(x);  push(g, v, i)
    server:  push: if v is old: drop;  keep g;  when `aggregate` are here: x <- x - lr * mean of them;  v <- v + 1

    aggregate = workers (the default) waits for all; fewer makes the rest backup workers. A version takes at most one
    gradient of each worker; `sync-repeat` takes several. Kept gradients are added in the order of ranks, whatever the
    order of arrival. Differs from TensorFlow's SyncReplicasOptimizer: a worker that was late pulls the newest version,
    it holds no token of an old one. `--hook start-barrier` makes the workers start together.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    aggregate: Count | None = None
    reduce: Literal["mean", "sum"] = "mean"
    rule_at_server = True
    warnings = stability.synchronous
    retired: ClassVar[dict[str, str]] = {
        "repeat": "several gradients of a worker per update are the scheme sync-repeat",
        "barrier": "workers start together with the hook start-barrier",
    }
    family = "synchronous"
    compresses = ("push.g",)
    good_for = "equal devices with a server, or stragglers that backup workers replace"
    volume = "2"
    limit = "lr * h < 2"
    equals = "workers=1 is sgd; aggregate=workers is allreduce"

    def server(self, x0: Vector, workers: int) -> State:
        need = self.aggregate or workers
        return State(
            x=x0,
            need=need,
            present=workers,
            got=0,
            kept=torch.zeros(need, len(x0), dtype=x0.dtype),
            whose=torch.zeros(need, dtype=torch.int64),
            latest=torch.full((workers,), -1),  # the last version that has a gradient of this worker
            **self.applied.cells(x0),
        )

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, next=0)

    @property
    def applied(self) -> Rule:
        """The server's rule."""
        return self.rule

    @on_server(reads=True, when=lambda self, s, r: s.v >= r)
    def pull(self, s: State, r: int) -> tuple[Vector, int]:
        return s.x, s.v

    @on_server
    def push(self, s: State, g: Vector, v: int, rank: int) -> None:
        if v < s.v or s.entry("latest", rank) == v:
            s.refuse()
            return
        s.admit(v)
        s.write("latest", rank, v)
        if s.got + 1 < s.need:
            s.write("kept", s.got, g)
            s.write("whose", s.got, rank)
            s.got += 1
        else:
            self._update(s, (rank, g))

    def _update(self, s: State, *last: tuple[int, Vector]) -> None:
        gradients = in_order(s, *last)
        self.applied.apply(s, self.combined(gradients) if self.reduce == "mean" else sum_of(gradients), self.lr)
        s.v += 1
        s.got = 0

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull(w.next)
        g = await w.grad(w.x)
        await self.push(g, w.v, w.rank)
        w.next = w.v + 1

    def left(self, s: State, rank: int) -> None:
        s.present -= 1
        if 0 < s.present < s.need:
            s.need = s.present
        if s.got >= s.need:
            self._update(s)

    def joined(self, s: State, rank: int) -> None:
        s.present += 1
        s.need = min(len(s.whose), s.present)

    def exact(self, workers: int) -> str | None:
        if self.aggregate in (None, workers):
            return None
        return f"which {self.aggregate} of {workers} gradients come first is chance; omit aggregate"

    def check(self, workers: int) -> None:
        if self.aggregate and self.aggregate > workers:
            raise UsageError(
                f"{self.name}: aggregate is {self.aggregate}, but {workers} workers give one gradient each per update; "
                "lower aggregate, or use the scheme sync-repeat, in which a worker gives several"
            )

    def gradients_per_update(self, workers: int) -> float:
        return self.aggregate or workers

    def gain(self, workers: int, curvature: float) -> Gain | None:
        gain = super().gain(workers, curvature)
        return gain and gain._replace(share=gain.share * self._times(workers))

    def _times(self, workers: int) -> int:
        """How many gradients a sum adds up."""
        return (self.aggregate or workers) if self.reduce == "sum" else 1


def in_order(s: State, *last: tuple[int, Vector]) -> list[Vector]:
    """The gradients of a version in the order of ranks: those kept, and the last one, which needs no copy."""
    pairs = [*zip(s.whose[: s.got].tolist(), s.kept[: s.got], strict=True), *last]
    return [g for _, g in sorted(pairs, key=lambda pair: pair[0])]
