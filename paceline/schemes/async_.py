"""Asynchronous SGD with a parameter server."""

from dataclasses import dataclass

from paceline import stability
from paceline.rules import SGD, Rule
from paceline.scheme import Rate, Scheme, State, Vector, on_server
from paceline.worker import Worker


@dataclass(frozen=True)
class AsyncSGD(Scheme):
    """Asynchronous SGD: each worker pushes every gradient at once, without waiting for other workers.

    Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, with a window of one.

    worker:  x, v <- pull();  g <- gradient(x);  push(g, v)
    server:  push: x <- x - lr * g;  v <- v + 1

    With one worker this is the guides' "distributed set-up" of one worker and one server: sequential SGD, bit for
    bit. Every push is added in full, so N workers move x about N times as far per sample as synchronous SGD at the
    same rate.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    asynchronous = True
    compresses = ("push.g",)
    rule_at_server = True
    warnings = stability.asynchronous
    family = "asynchronous"
    good_for = "uneven devices and little staleness: few workers, a small rate"
    volume = "2"
    limit = "lr * h < 2 sin(pi / (2 (2 workers - 1))) in turn"
    equals = "workers=1 is sgd"

    def server(self, x0: Vector, workers: int) -> State:
        return State(x=x0, **self.rule.cells(x0))

    @on_server(reads=True)
    def pull(self, s: State) -> tuple[Vector, int]:
        return s.x, s.v

    @on_server
    def push(self, s: State, g: Vector, v: int) -> None:
        s.admit(v)
        self.rule.apply(s, g, self.lr)
        s.v += 1

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull()
        g = await w.grad(w.x)
        await self.push(g, w.v)

    def exchanged(self, s: State, gradients: Vector) -> Vector | None:
        after = self.rule.row(s.x, gradients, self.lr)
        if after is not None:
            s.x = after[-1]
            s.v += len(after)
        return after

    def gradients_per_update(self, workers: int) -> float:
        return 1
