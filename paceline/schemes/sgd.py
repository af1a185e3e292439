"""Sequential SGD: the reference that the other schemes are compared with."""

from dataclasses import dataclass

from paceline import stability
from paceline.errors import UsageError
from paceline.rules import SGD, Rule
from paceline.scheme import Rate, Scheme, State, Vector
from paceline.worker import Worker


@dataclass(frozen=True)
class SequentialSGD(Scheme):
    """Plain SGD on one worker, nothing distributed.

    Robbins, Monro, A Stochastic Approximation Method, 1951.

    worker:  g <- gradient(x);  x <- x - lr * g
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    alone = True
    fixed_order = True
    warnings = stability.synchronous
    family = "synchronous"
    good_for = "one device; the reference that the others are measured against"
    volume = "0"
    limit = "lr * h < 2"

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, **self.rule.cells(x0))

    async def step(self, w: Worker) -> None:
        g = await w.grad(w.x)
        self.rule.apply(w.state, g, self.lr)
        w.v += 1

    def gradients_per_update(self, workers: int) -> float:
        return 1

    def check(self, workers: int) -> None:
        if workers != 1:
            raise UsageError(f"sgd is not distributed: it takes 1 worker, not {workers}; try 'sync' or 'async'")
