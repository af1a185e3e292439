"""SlowMo: local steps, an exact mean of the models, and a slow momentum over the means."""

from dataclasses import dataclass

import torch

from paceline import stability
from paceline.fields import Steps
from paceline.rules import SGD, Rule
from paceline.schedules import Schedule
from paceline.scheme import Fraction, Rate, Scheme, State, Vector
from paceline.schemes._local import Buffers, local_steps, settle_buffers, whole
from paceline.worker import Worker


@dataclass(frozen=True)
class SlowMo(Scheme):
    """SlowMo: the change from one mean of the models to the next is a gradient for a slow momentum.

    Wang, Tantia, Ballas, Rabbat 2019 (arXiv 1910.00643), Algorithm 1.

    worker:  `window` times: y <- y - lr * gradient(y);  ybar <- mean of y over the workers
             u <- beta * u + (x - ybar) / lr;  x <- x - alpha * lr * u;  y <- x

    alpha = 1 and beta = 0 is local SGD. With a constant lr it is `diloco` with `outer=momentum`, outer.momentum = beta
    and outer_lr = alpha. `buffers` says whether the rule's buffers stay local, are reset, or are averaged at a mean.
    Differs from the paper: its defaults depend on the data set; these are those of the usual implementation for torch.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    window: Steps = 48
    alpha: Rate = 1.0
    beta: Fraction = 0.5
    buffers: Buffers = "local"
    fixed_order = True
    warnings = stability.synchronous
    family = "local updates"
    good_for = "a slow network: a momentum over the means gives back what long windows lose"
    volume = "2 / window"
    limit = "lr * h < 2; the momentum moves x 1 / (1 - beta) as far in the long run"
    equals = "alpha=1 beta=0 is local-sgd, up to rounding; a constant lr is diloco with outer=momentum, up to rounding"

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, slow=x0, u=torch.zeros_like(x0), **self.rule.cells(x0))

    async def step(self, w: Worker) -> None:
        await local_steps(w, self.rule, self.lr, whole(self.window))
        mean = await w.mean(w.x)
        await settle_buffers(w, self.rule, self.buffers)
        lr = self.rule.rate(self.lr)
        if lr:  # at the end of a schedule the rate may be 0: nothing has moved
            w.u = self.beta * w.u + (w.slow - mean) / lr
            w.slow -= self.alpha * lr * w.u
        w.x = w.slow
        w.v += 1

    def model(self, s: State) -> Vector:
        slow: Vector = s.slow
        return slow

    def gradients_per_update(self, workers: int) -> float | None:
        return None if isinstance(self.window, Schedule) else workers * self.window
