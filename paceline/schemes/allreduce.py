"""Synchronous SGD without a server."""

from dataclasses import dataclass

from paceline import stability
from paceline.rules import SGD, Rule
from paceline.scheme import Rate, Scheme, State, Vector
from paceline.worker import Worker


@dataclass(frozen=True)
class AllReduce(Scheme):
    """Synchronous SGD by all-reduce: the workers average their gradients and make the same step.

    Goyal et al., Accurate, Large Minibatch SGD, 2017 (arXiv 1706.02677) describes the practice.

    worker:  g <- gradient(x);  g <- mean of g over the workers;  x <- x - lr * g

    The same bits as `sync` with all workers.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    fixed_order = True
    compresses = ("mean",)
    warnings = stability.synchronous
    family = "synchronous"
    good_for = "equal devices on a fast network; the usual choice on GPUs of one machine"
    volume = "2"
    limit = "lr * h < 2"
    equals = "workers=1 is sgd; the same bits as sync with all workers"

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, **self.rule.cells(x0))

    async def step(self, w: Worker) -> None:
        g = await w.grad(w.x)
        g = await w.mean(g)
        self.rule.apply(w.state, g, self.lr)
        w.v += 1

    def gradients_per_update(self, workers: int) -> float:
        return workers
