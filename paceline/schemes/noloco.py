"""NoLoCo: DiLoCo without a mean over all. After a window a worker exchanges with one random other worker only."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.fields import Steps
from paceline.rules import AdamW, Rule
from paceline.sampling import mixed
from paceline.schedules import Schedule
from paceline.scheme import Count, Fraction, Rate, Scheme, State, Vector, mean_of
from paceline.schemes._local import local_steps, whole
from paceline.worker import Worker


@dataclass(frozen=True)
class NoLoCo(Scheme):
    """NoLoCo: local steps, then an outer step with a random partner, whose term gamma pulls the two models together.

    Kolehmainen, Blagoev, Donaghy, Ersoy, Nies 2025 (arXiv 2506.10911). Arithmetic and defaults: the authors' code.

    worker:  `window` times: y <- y - lr * rule(gradient(y));  a group of `size` random workers, itself among them:
             m <- momentum * m + outer_lr * (mean of y - x over the group) + gamma * (mean of x over the group - x)
             x <- x + m;  y <- x

    Every worker has an x of its own; the model is their mean. Groups follow from the seed and the step; with workers
    left over, one group is smaller. gamma: outer_lr unless given. The sum of all x moves by the mean deltas alone,
    whatever gamma is. One worker, or two, are `diloco` with outer=momentum. Differs from the paper: a worker sends
    outer_lr * (y - x) + gamma * x, of which the update needs the mean, in place of both vectors; partners meet at the
    same step, and nobody replaces a dead one; pipeline stages, which the paper routes at random, are no part of it.
    """

    lr: Rate = 6e-4
    rule: Rule = AdamW(weight_decay=0.0)
    window: Steps = 50
    size: Count = 2
    outer_lr: Rate = 0.7
    momentum: Fraction = 0.5
    gamma: Rate | None = None
    fixed_order = True
    decentralised = True
    compresses = ("meet",)
    family = "decentralised"
    good_for = "many workers over the internet: nobody waits for all, and a window ends with one exchange"
    volume = "2 * (size - 1) / window"
    limit = "gamma < 2 * (1 + momentum); the momentum moves x outer_lr / (1 - momentum) as far in the long run"
    equals = "workers=1 and workers=2 are diloco with outer=momentum, up to rounding; size=1 are independent runs"

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, slow=x0, m=torch.zeros_like(x0), **self.rule.cells(x0))

    async def step(self, w: Worker) -> None:
        await local_steps(w, self.rule, self.lr, whole(self.window))
        gamma = self.outer_lr if self.gamma is None else self.gamma
        vectors = {w.rank: self.outer_lr * (w.x - w.slow) + gamma * w.slow}
        group = self.group(w.rank, w.workers, w.t, w.seed)
        met = await w.meet(vectors[w.rank], group, among=group) if len(group) > 1 else None
        vectors |= met.vectors if met else {}
        w.m = self.momentum * w.m + mean_of([vectors[rank] for rank in sorted(vectors)]) - gamma * w.slow
        if met and met.lost is not None:  # what the others did not get stays here, so that the sum of x does
            w.m += (1 - 1 / len(vectors)) * met.lost
        w.slow += w.m
        w.x = w.slow
        w.v += 1

    def group(self, rank: int, workers: int, t: int, seed: int) -> Sequence[int]:
        """The workers that a worker meets at step t, itself among them."""
        stream = torch.Generator().manual_seed(mixed(seed, "gossip", t))
        order: list[int] = torch.randperm(workers, generator=stream).tolist()
        first = order.index(rank) // self.size * self.size
        return order[first : first + self.size]

    def model(self, s: State) -> Vector:
        slow: Vector = s.slow
        return slow

    def gradients_per_update(self, workers: int) -> float | None:
        return None if isinstance(self.window, Schedule) else workers * self.window
