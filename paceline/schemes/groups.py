"""Groups: synchronous inside, asynchronous between."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from paceline import stability
from paceline.rules import SGD, Rule
from paceline.scheme import Count, Rate, Scheme, State, Vector, on_server
from paceline.worker import Worker


@dataclass(frozen=True)
class Groups(Scheme):
    """Synchronous groups that are asynchronous to each other.

    Kurth et al., Deep Learning at 15PF, 2017 (arXiv 1708.05256).

    worker:  y, v <- pull(group);  g <- gradient(y);  g <- mean of g over the group;  push(g, v, group)
    server:  push: the first of a group for its version: x <- x - lr * g;  v <- v + 1;  y_group <- x
             the others of the group: nothing more

    One group is synchronous SGD, groups of one are asynchronous SGD. Staleness is counted between groups. Differs
    from the paper: every member talks to the server, which applies a group's mean once, so no leader's death can stop
    a group.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    size: Count = 2
    asynchronous = True
    compresses = ("mean",)
    rule_at_server = True
    family = "groups and hierarchies"
    good_for = "fast links inside nodes, slow ones between them"
    volume = "4"
    limit = "as async with a worker for each group"
    equals = "size=workers is sync; size=1 is async"

    def server(self, x0: Vector, workers: int) -> State:
        groups = -(-workers // self.size)
        return State(
            x=x0, given=x0.repeat(groups, 1), version=torch.zeros(groups, dtype=torch.int64), **self.rule.cells(x0)
        )

    def holder(self, rank: int) -> int:
        return rank // self.size

    @on_server
    def pull(self, s: State, group: int) -> tuple[Vector, int]:
        version = int(s.version[group])
        s.lend(version)
        return s.given[group], version

    @on_server
    def push(self, s: State, g: Vector, v: int, group: int) -> None:
        if v != s.version[group]:
            return  # another member was first
        s.admit(v)
        self.rule.apply(s, g, self.lr)
        s.v += 1
        s.given[group] = s.x
        s.version[group] = s.v

    async def step(self, w: Worker) -> None:
        group = self.holder(w.rank)
        first = group * self.size
        w.x, w.v = await self.pull(group)
        g = await w.grad(w.x)
        g = await w.mean(g, among=range(first, min(first + self.size, w.workers)))
        await self.push(g, w.v, group)

    def gradients_per_update(self, workers: int) -> float:
        return workers / -(-workers // self.size)

    def exact(self, workers: int) -> str | None:
        if self.size >= workers:
            return None
        return f"{workers} workers in groups of {self.size} update in no fixed order; size={workers} makes one group"

    def warnings(self, workers: int, curvature: float | None) -> Iterator[str]:
        return stability.asynchronous(self, -(-workers // self.size), curvature)
