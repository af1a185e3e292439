"""DiLoCo: many local steps of AdamW, then an outer step of Nesterov momentum along the mean delta."""

from dataclasses import dataclass

from paceline.fields import Steps
from paceline.rules import AdamW, Nesterov, Rule
from paceline.schedules import Schedule
from paceline.scheme import Rate, Scheme, State, Vector
from paceline.schemes._local import local_steps, outer_cells, whole
from paceline.worker import Worker


@dataclass(frozen=True)
class DiLoCo(Scheme):
    """DiLoCo: workers train alone for a long window; the mean of their deltas is a gradient for an outer rule.

    Douillard et al. 2023 (arXiv 2311.08105), Algorithm 1; MuLoCo (arXiv 2505.23725) is `rule=muon`.

    worker:  `window` times: y <- y - lr * rule(gradient(y));  d <- mean of x - y over the workers
             m <- momentum * m + d;  x <- x - outer_lr * (d + momentum * m);  y <- x

    `rule` makes the local steps, and keeps its buffers; `outer` makes the outer step, at outer_lr. What is evaluated is
    x. outer=sgd with outer_lr=1 is local SGD up to rounding. The arithmetic is torchft's (local_sgd.py), where the mean
    delta is the gradient of torch's SGD(nesterov=True). Differs from the paper: all workers take part in every outer
    step, and their deltas count alike.
    """

    lr: Rate = 4e-4
    rule: Rule = AdamW(weight_decay=0.1)
    window: Steps = 500
    outer: Rule = Nesterov()
    outer_lr: Rate = 0.7
    fixed_order = True
    family = "local updates"
    compresses = ("mean",)
    good_for = "language models over links between data centres"
    volume = "2 / window"
    limit = "the outer momentum moves x outer_lr / (1 - momentum) as far in the long run"
    equals = "outer=sgd outer_lr=1 rule=sgd is local-sgd, up to rounding"

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, outer_x=x0, **outer_cells(self.outer, x0), **self.rule.cells(x0))

    async def step(self, w: Worker) -> None:
        await local_steps(w, self.rule, self.lr, whole(self.window))
        centre = w.state.under("outer_")
        d = await w.mean(centre.x - w.x)
        self.outer.apply(centre, d, self.outer_lr)
        w.x = centre.x
        w.v += 1

    def model(self, s: State) -> Vector:
        x: Vector = s.outer_x
        return x

    def gradients_per_update(self, workers: int) -> float | None:
        return None if isinstance(self.window, Schedule) else workers * self.window
