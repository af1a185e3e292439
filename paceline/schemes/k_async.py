"""K-async and K-batch-async SGD: an update of K gradients, however old."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from paceline import stability
from paceline.errors import UsageError
from paceline.scheme import State, Vector, on_server
from paceline.schemes._collected import Collected
from paceline.worker import Worker


@dataclass(frozen=True)
class KAsync(Collected, name="k-async"):
    """K-async SGD: the first k workers that push make an update and wait for it; the others compute on, at an old x.

    Dutta, Joshi, Ghosh, Dube, Nagpurkar, Slow and Stale Gradients Can Win the Race, 2018 (arXiv 1803.01113).

    worker:  x, v <- pull(i) once the update with its last gradient is made;  g <- gradient(x);  push(g, v, i)
    server:  push: keep g;  when k workers' are here: x <- x - lr * mean of them;  v <- v + 1

    k: half of the workers unless given; with adapt_every=n it grows as the loss falls (AdaSync). The mean staleness is
    (workers - k) / k. Differs from the paper: gradients are added in the order of ranks; a gradient of a worker that
    has died is used all the same.
    """

    asynchronous = True
    waits = "sometimes"
    family = "bounded or corrected staleness"
    good_for = "a choice between sync and async by one number: less noise per update, less staleness"
    volume = "2"
    limit = "lr * h below the limit of async with workers / k workers, about"
    equals = "k=workers is sync; k=1 is async"

    def server(self, x0: Vector, workers: int) -> State:
        waits, alive = torch.zeros(workers, dtype=torch.int64), torch.ones(workers, dtype=torch.int64)
        kept = self.kept_cells(x0, workers)
        return State(x=x0, waits=waits, alive=alive, **kept, **self.rule.cells(x0))

    @on_server(reads=True, when=lambda self, s, rank: not s.waits[rank])
    def pull(self, s: State, rank: int) -> tuple[Vector, int]:
        return s.x, s.v

    @on_server
    def push(self, s: State, g: Vector, v: int, rank: int) -> None:
        s.admit(v)
        s.waits[rank] = 1
        if self.keep(s, g, rank):
            s.waits = 0
            self._agree(s)

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull(w.rank)
        g = await w.grad(w.x)
        await self.reported(w)
        await self.push(g, w.v, w.rank)

    def left(self, s: State, rank: int) -> None:
        s.alive[rank] = 0
        self._agree(s)

    def joined(self, s: State, rank: int) -> None:
        s.alive[rank] = 1
        self._agree(s)

    def needed(self, s: State) -> int:
        """As many gradients make an update as there are, at most k: those kept, and one of each other living worker."""
        return max(1, min(super().needed(s), int((s.alive | s.waits).sum())))

    def _agree(self, s: State) -> None:
        s.need = self.needed(s)
        if s.got >= s.need:
            self.update(s)
            s.waits = 0
            s.need = self.needed(s)  # of the dead none is kept any more

    def warnings(self, workers: int, curvature: float | None) -> Iterator[str]:
        return stability.asynchronous(self, max(1, workers // self.wanted(workers)), curvature)

    def exact(self, workers: int) -> str | None:
        k = self.wanted(workers)
        return None if k == workers else f"which {k} of {workers} gradients come first is chance; give k={workers}"

    def check(self, workers: int) -> None:
        if self.wanted(workers) > workers:
            raise UsageError(
                f"{self.name}: k is {self.k}, but an update takes one gradient of each of {workers} workers"
            )


@dataclass(frozen=True)
class KBatchAsync(Collected, name="k-batch-async"):
    """K-batch-async SGD: every k pushes make an update; no worker ever waits.

    Dutta, Joshi, Ghosh, Dube, Nagpurkar, Slow and Stale Gradients Can Win the Race, 2018 (arXiv 1803.01113).

    worker:  x, v <- pull();  g <- gradient(x);  push(g, v, i)
    server:  push: keep g;  when k are here: x <- x - lr * mean of them;  v <- v + 1

    k: half of the workers unless given; it may be more than the workers, and with adapt_every=n it grows as the loss
    falls (AdaSync). The mean staleness is (workers - 1) / k. Differs from the paper: gradients are added in the order
    of ranks.
    """

    asynchronous = True
    family = "bounded or corrected staleness"
    good_for = "uneven workers that never wait, with less noise and staleness per update than async"
    volume = "2"
    limit = "lr * h below the limit of async with workers / k workers, about"
    equals = "k=1 is async; softsync with weight=constant and n = workers / k"

    @on_server(reads=True)
    def pull(self, s: State) -> tuple[Vector, int]:
        return s.x, s.v

    @on_server
    def push(self, s: State, g: Vector, v: int, rank: int) -> None:
        self.keep(s, self.weighed(g, s.admit(v)), rank)

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull()
        g = await w.grad(w.x)
        await self.reported(w)
        await self.push(g, w.v, w.rank)

    def weighed(self, g: Vector, staleness: int) -> Vector:
        """What a gradient of this staleness counts."""
        return g

    def warnings(self, workers: int, curvature: float | None) -> Iterator[str]:
        return stability.asynchronous(self, max(1, workers // self.wanted(workers)), curvature)
