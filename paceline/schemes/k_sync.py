"""K-sync and K-batch-sync SGD: the first K gradients of a version make an update, of any workers."""

from dataclasses import dataclass

import torch

from paceline.errors import UsageError
from paceline.scheme import State, Vector, on_server
from paceline.schemes._collected import Collected
from paceline.worker import Worker


@dataclass(frozen=True)
class KSync(Collected, name="k-sync"):
    """K-sync SGD: the first k workers of a version make the next one, and the others give their gradients up.

    Dutta, Joshi, Ghosh, Dube, Nagpurkar, Slow and Stale Gradients Can Win the Race, 2018 (arXiv 1803.01113).

    worker:  x, v <- pull() once version v is open;  g <- gradient(x), stopped when v + 1 is there;  push(g, v, i)
    server:  push: if v is old: drop;  keep g;  when k workers' are here: x <- x - lr * mean of them;  v <- v + 1

    k: half of the workers unless given; with adapt_every=n it grows as the loss falls (AdaSync). `cancel=false` lets a
    late worker finish its gradient, which is then dropped: `sync` with backup workers. In processes a gradient is
    stopped between two layers, and by tasks that cannot stop at its end (docs/add-a-scheme.md). Differs from the paper:
    gradients are added in the order of ranks.
    """

    cancel: bool = True
    waits = "sometimes"
    family = "bounded or corrected staleness"
    good_for = "stragglers that change all the time: the slowest of every round are not waited for"
    volume = "2"
    limit = "lr * h < 2"
    equals = "k=workers is sync; cancel=false is sync with aggregate=k"

    def server(self, x0: Vector, workers: int) -> State:
        latest, alive = torch.full((workers,), -1), torch.ones(workers, dtype=torch.int64)
        kept = self.kept_cells(x0, workers)
        return State(x=x0, latest=latest, alive=alive, **kept, **self.rule.cells(x0))

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, next=0)

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
        self.keep(s, g, rank)

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull(w.next)
        g = await w.grad(w.x, until=w.v + 1 if self.cancel else None)
        if g is not None:
            await self.reported(w)
            await self.push(g, w.v, w.rank)
        w.next = w.v + 1

    def left(self, s: State, rank: int) -> None:
        s.alive[rank] = 0
        self._agree(s)

    def joined(self, s: State, rank: int) -> None:
        s.alive[rank] = 1
        self._agree(s)

    def needed(self, s: State) -> int:
        return max(1, min(super().needed(s), int(s.alive.sum())))

    def _agree(self, s: State) -> None:
        s.need = self.needed(s)
        if s.got >= s.need:
            self.update(s)

    def exact(self, workers: int) -> str | None:
        k = self.wanted(workers)
        return None if k == workers else f"which {k} of {workers} gradients come first is chance; give k={workers}"

    def check(self, workers: int) -> None:
        if self.wanted(workers) > workers:
            raise UsageError(
                f"{self.name}: k is {self.k}, but an update takes one gradient of each of {workers} workers"
            )


@dataclass(frozen=True)
class KBatchSync(Collected, name="k-batch-sync"):
    """K-batch-sync SGD: the first k gradients of a version make the next one; a fast worker gives several.

    Dutta, Joshi, Ghosh, Dube, Nagpurkar, Slow and Stale Gradients Can Win the Race, 2018 (arXiv 1803.01113).

    worker:  x, v <- pull();  g <- gradient(x), stopped when version v + 1 is there;  push(g, v, i)
    server:  push: if v is old: drop;  keep g;  when k are here: x <- x - lr * mean of them;  v <- v + 1

    k: half of the workers unless given; it may be more than the workers, and with adapt_every=n it grows as the loss
    falls (AdaSync). No worker ever waits. `rennala` is the same with another choice of k. Differs from the paper:
    gradients are added in the order of ranks.
    """

    cancel: bool = True
    waits = "never"
    family = "bounded or corrected staleness"
    good_for = "uneven workers without staleness: all of them compute all the time"
    volume = "2"
    limit = "lr * h < 2"
    equals = "workers=1, k=1 is sgd; the same as rennala"

    @on_server(reads=True)
    def pull(self, s: State) -> tuple[Vector, int]:
        return s.x, s.v

    @on_server
    def push(self, s: State, g: Vector, v: int, rank: int) -> None:
        if v < s.v:
            s.refuse()
            return
        s.admit(v)
        self.keep(s, g, rank)

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull()
        g = await w.grad(w.x, until=w.v + 1 if self.cancel else None)
        if g is not None:
            await self.reported(w)
            await self.push(g, w.v, w.rank)

    def exact(self, workers: int) -> str:
        return "the fastest workers give more gradients than others, and which ones is chance"
