"""HALoS: workers push to the server of their region, and the regions to a global server, none of them waits."""

from dataclasses import dataclass

import torch

from paceline.rules import AdamW, Rule
from paceline.scheme import Count, Fraction, Rate, Scheme, State, Vector, on_server
from paceline.schemes._delayed_nesterov import delayed_nesterov
from paceline.worker import Worker


@dataclass(frozen=True)
class HALoS(Scheme):
    """HALoS: hierarchical asynchronous local SGD, with delayed Nesterov momentum in every region and above them.

    Kim et al. 2025 (arXiv 2506.04531), Algorithms 1 to 3.

    worker:  y, v <- pull(region);  `window` times: y <- y - lr * rule(gradient(y));  push(x - y, v, region)
    server:  push: x_r <- x_r - local_lr * p, with a delayed Nesterov momentum of the region (`local_buffer` pushes)
             every `pushes` of a region:  x <- x - global_lr * (s_r - x_r), with one of its own;  v <- v + 1
                 x_r <- (1 - merge) * x_r + merge * x;  s_r <- x_r

    A region is `size` workers that follow each other. One region, pushes=1, merge=1, both buffers 1, both momenta 0 and
    both rates 1 push the deltas of `downpour-easy`. Differs from the paper: the servers of the regions and the global
    one are one server here, so that a region has its reply at once; all windows are alike.
    """

    lr: Rate = 4e-4
    rule: Rule = AdamW(weight_decay=0.1)
    window: Count = 8
    size: Count = 2
    pushes: Count = 32
    merge: Fraction = 0.25
    local_lr: Rate = 0.2
    local_momentum: Fraction = 0.9
    local_buffer: Count = 16
    global_lr: Rate = 0.15
    global_momentum: Fraction = 0.5
    global_buffer: Count = 2
    asynchronous = True
    compresses = ("push.p",)
    family = "groups and hierarchies"
    good_for = "regions with fast links inside and slow ones between them"
    volume = "2 / window"
    limit = "the momenta move x_r local_lr / (1 - momentum) and x global_lr / (1 - momentum) as far in the long run"
    equals = "one region, pushes=1 merge=1, buffers 1, momenta 0, rates 1 and rule=sgd is downpour-easy, up to rounding"

    def server(self, x0: Vector, workers: int) -> State:
        zero = torch.zeros_like(x0)
        regions = -(-workers // self.size)
        rows = x0.repeat(regions, 1)
        return State(
            x=x0,
            m=zero,
            b=zero,
            local=rows,
            merged=rows,  # the region's model after its last exchange with x
            local_m=torch.zeros_like(rows),
            local_b=torch.zeros_like(rows),
            got=torch.zeros(regions, dtype=torch.int64),
        )

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, **self.rule.cells(x0))

    @on_server
    def pull(self, s: State, region: int) -> tuple[Vector, int]:
        s.lend(s.v)
        return s.local[region], s.v

    @on_server
    def push(self, s: State, p: Vector, v: int, region: int) -> None:
        s.admit(v)
        s.got[region] += 1
        got, x = int(s.got[region]), s.local[region]
        n = self.local_buffer
        how = {"lr": self.local_lr * n, "momentum": self.local_momentum, "activation": 0.0}
        delayed_nesterov(x, s.local_m[region], s.local_b[region], p, last=got % n == 0, n=n, **how)
        if got % self.pushes:
            return
        n = self.global_buffer
        how = {"lr": self.global_lr * n, "momentum": self.global_momentum, "activation": 0.0}
        delayed_nesterov(s.x, s.m, s.b, s.merged[region] - x, last=(s.v + 1) % n == 0, n=n, **how)
        s.v += 1
        x.lerp_(s.x, self.merge)
        s.merged[region] = x

    async def step(self, w: Worker) -> None:
        region = w.rank // self.size
        w.x, w.v = await self.pull(region)
        now = self.rates_at(w.state)  # the rates of the version that was pulled
        x = w.x.clone()
        for _ in range(self.window):
            now.rule.apply(w.state, await w.grad(w.x), now.lr)
        await self.push(x - w.x, w.v, region)

    def gradients_per_update(self, workers: int) -> float:
        return self.window * self.pushes
