"""Federated averaging: some clients train alone from the centre; the mean of their deltas moves it."""

from dataclasses import dataclass
from typing import Annotated

import torch

from paceline import stability
from paceline.errors import UsageError
from paceline.fields import Natural
from paceline.rules import SGD, Rule
from paceline.sampling import mixed
from paceline.scheme import Bound, Count, Rate, Scheme, State, Vector, mean_of, on_server
from paceline.worker import Worker

WAITED_FOR, HEARD = 1, 2  # what a client is in a round; 0: it is not of this round


@dataclass(frozen=True)
class FedAvg(Scheme):
    """Federated averaging: each round some clients train from x, and x becomes the weighted mean of their models.

    McMahan, Moore, Ramage, Hampson, Agüera y Arcas 2016 (arXiv 1602.05629), Algorithm 1.

    worker:  y, v <- pull() once a round has chosen it;  `window` times: y <- y - lr * gradient(y);  push(x - y, v, i)
    server:  chooses `fraction` of the clients;  push: keep it;  when all chosen are here: x <- x - mean of x - y_i
             weighted by samples;  v <- v + 1

    Workers are clients. Who is of a round is a function of `draw` and v. `weights` has the number of samples of each
    client, in the order of ranks; without it all count alike. A client that dies is replaced by one that is not of the
    round, if there is one. Differs from the paper: a client makes `window` steps, not epochs, and keeps the buffers of
    its rule between rounds; what travels is x - y, so that a server's rule can use it (`fedopt`).
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    window: Count = 5
    fraction: Annotated[float, Bound(0, 1, above=True)] = 1.0
    weights: tuple[Rate, ...] = ()
    draw: Natural = 0
    warnings = stability.synchronous
    family = "local updates"
    compresses = ("push.delta",)
    good_for = "clients with data of their own, of which only some take part at a time"
    volume = "2 / window"
    limit = "lr * h < 2"
    equals = "fraction=1 is local-sgd, up to rounding"

    def server(self, x0: Vector, workers: int) -> State:
        state = State(
            x=x0,
            got=0,
            waited_for=0,
            kept=torch.zeros(self.chosen(workers), len(x0), dtype=x0.dtype),
            whose=torch.zeros(self.chosen(workers), dtype=torch.int64),
            present=torch.ones(workers, dtype=torch.int64),
            turn=torch.zeros(workers, dtype=torch.int64),
            **self.applied.cells(x0),
        )
        self._choose(state)
        return state

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, next=0, **self.rule.cells(x0))

    @property
    def applied(self) -> Rule:
        """The server's rule, at a rate of 1 unless it has one of its own."""
        return SGD()

    def chosen(self, workers: int) -> int:
        """The number of clients in a round."""
        return max(1, round(self.fraction * workers))

    def _choose(self, s: State) -> None:
        """Fill the round with clients that are present, in an order that the version fixes."""
        turn, present, room = s.turn.tolist(), s.present.tolist(), len(s.whose) - s.got - s.waited_for
        free = [rank for rank, here in enumerate(present) if here and not turn[rank]]
        if room < len(free):
            free = sorted(free, key=lambda rank: mixed("clients", self.draw, s.v, rank))[:room]
        if free:
            s.turn[free] = WAITED_FOR
            s.waited_for += len(free)

    @on_server(reads=True, when=lambda self, s, rank, r: s.v >= r and s.turn[rank] == WAITED_FOR)
    def pull(self, s: State, rank: int, r: int) -> tuple[Vector, int]:
        return s.x, s.v

    @on_server
    def push(self, s: State, delta: Vector, v: int, rank: int) -> None:
        if v < s.v or s.turn[rank] != WAITED_FOR:
            s.refuse()
            return
        s.admit(v)
        s.write("kept", s.got, delta)
        s.write("whose", s.got, rank)
        s.got += 1
        s.turn[rank] = HEARD
        s.waited_for -= 1
        self._close(s)

    def _close(self, s: State) -> None:
        """The round ends when all of its clients were heard."""
        if s.got == 0 or s.waited_for:
            return
        heard = sorted(zip(s.whose[: s.got].tolist(), s.kept[: s.got], strict=True), key=lambda pair: pair[0])
        weights = [self.weights[rank] for rank, _ in heard] if self.weights else None
        self.applied.apply(s, mean_of([delta for _, delta in heard], weights), 1.0)
        s.v += 1
        s.got = 0
        s.turn = 0
        self._choose(s)

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull(w.rank, w.next)
        now = self.rates_at(w.state)  # the rates of the version that was pulled
        x = w.x.clone()
        for _ in range(self.window):
            g = await w.grad(w.x)
            now.rule.apply(w.state, now.corrected(g, w.x, x), now.lr)
        await self.push(x - w.x, w.v, w.rank)
        w.next = w.v + 1

    def corrected(self, g: Vector, y: Vector, x: Vector) -> Vector:
        """The gradient of a client's own loss."""
        return g

    def left(self, s: State, rank: int) -> None:
        s.present[rank] = 0
        if s.turn[rank] == WAITED_FOR:
            s.turn[rank] = 0
            s.waited_for -= 1
            self._choose(s)
            self._close(s)

    def joined(self, s: State, rank: int) -> None:
        s.present[rank] = 1
        self._choose(s)

    def exact(self, workers: int) -> str | None:
        if self.chosen(workers) == workers:
            return None
        return f"only {self.chosen(workers)} of {workers} clients make an update; omit fraction"

    def check(self, workers: int) -> None:
        if self.weights and len(self.weights) != workers:
            raise UsageError(
                f"{self.name}: weights has {len(self.weights)} numbers for {workers} clients; give one each"
            )
        if self.weights and not all(self.weights):
            raise UsageError(f"{self.name}: a client without samples cannot be chosen; give numbers above 0")

    def gradients_per_update(self, workers: int) -> float:
        return self.chosen(workers) * self.window
