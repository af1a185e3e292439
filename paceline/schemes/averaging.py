"""Model averaging: each worker trains alone for a round, then the models are averaged."""

from dataclasses import dataclass

from paceline import stability
from paceline.rules import SGD, Rule
from paceline.scheme import Count, Rate, Scheme, State, Vector
from paceline.worker import Worker


@dataclass(frozen=True)
class ModelAveraging(Scheme):
    """Model averaging per round: a window of local steps, then every worker takes the mean of all models.

    McDonald, Hall, Mann, Distributed Training Strategies for the Structured Perceptron, 2010; Stich 2018 (arXiv
    1805.09767).

    worker:  `window` times: y <- y - lr * gradient(y);  y <- mean of y over the workers

    The memory of the rule (momentum, …) stays with the worker. A window of one with SGD is synchronous SGD up to
    rounding; with Adam it is not.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    window: Count = 10
    fixed_order = True
    warnings = stability.synchronous
    family = "local updates"
    good_for = "a slow network and data that are distributed alike"
    volume = "2 / window"
    limit = "lr * h < 2"
    equals = "window=1 with sgd is allreduce, up to rounding"

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, **self.rule.cells(x0))

    async def step(self, w: Worker) -> None:
        for _ in range(self.window):
            g = await w.grad(w.x)
            self.rule.apply(w.state, g, self.lr)
        w.x = await w.mean(w.x)
        w.v += 1

    def gradients_per_update(self, workers: int) -> float:
        return workers * self.window
