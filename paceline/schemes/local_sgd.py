"""Local SGD: local steps between two means of the models, with a window that may change during the run."""

from dataclasses import dataclass

from paceline import stability
from paceline.fields import Natural, Steps
from paceline.rules import SGD, Rule
from paceline.schedules import Schedule
from paceline.scheme import Rate, Scheme, State, Vector
from paceline.schemes._local import Buffers, local_steps, settle_buffers, whole
from paceline.worker import Worker


@dataclass(frozen=True)
class LocalSGD(Scheme):
    """Local SGD: a window of local steps, then every worker takes the mean of all models.

    Stich 2018 (arXiv 1805.09767); post-local SGD: Lin, Stich, Patel, Jaggi 2018 (arXiv 1808.07217).

    worker:  `window` times: y <- y - lr * gradient(y);  y <- mean of y over the workers

    The first `post_local` updates have a window of one (post-local SGD: until the first drop of the rate). A window may
    follow a schedule of updates: `window=step:1,over=100,gamma=2` doubles it every 100. `buffers` says what becomes of
    the rule's buffers at a mean: they stay local, are reset, or are averaged too. A window of one with SGD or momentum
    is synchronous SGD up to rounding; with Adam it is not. Without schedule and switch it is `averaging`. Differs from
    the paper: every worker computes the mean at the same step, none lags behind.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    window: Steps = 10
    post_local: Natural = 0
    buffers: Buffers = "local"
    fixed_order = True
    warnings = stability.synchronous
    family = "local updates"
    good_for = "a slow network; windows that change during the run"
    volume = "2 / window"
    limit = "lr * h < 2"
    equals = "post_local=0 with a constant window is averaging; window=1 with sgd is allreduce, up to rounding"

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, **self.rule.cells(x0))

    async def step(self, w: Worker) -> None:
        await local_steps(w, self.rule, self.lr, 1 if w.v < self.post_local else whole(self.window))
        w.x = await w.mean(w.x)
        await settle_buffers(w, self.rule, self.buffers)
        w.v += 1

    def gradients_per_update(self, workers: int) -> float | None:
        return None if self.post_local or isinstance(self.window, Schedule) else workers * self.window
