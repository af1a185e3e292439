"""Hierarchical local SGD: groups of groups of workers average their models, the larger the group the more seldom."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from paceline import stability
from paceline.errors import UsageError
from paceline.formula import evaluated
from paceline.rules import SGD, Rule
from paceline.scheme import Count, Rate, Scheme, State, Vector
from paceline.schemes._local import local_steps
from paceline.worker import Worker


@dataclass(frozen=True)
class Hierarchical(Scheme):
    """Hierarchical local SGD: models are averaged in a group often, in a group of groups less often, over all seldom.

    Lin, Stich, Patel, Jaggi 2018 (arXiv 1808.07217), hierarchical local SGD; more than two levels: Castiglia, Das,
    Patterson, Multi-Level Local SGD, 2020 (arXiv 2007.13819).

    worker:  windows[0] times: y <- y - lr * gradient(y);  y <- mean of y over the workers of its group
             every windows[1]-th of these means is over its group of groups, every windows[2]-th of those one level up

    `sizes` are the sizes of the groups, the smallest first, the top excepted, which is all workers: `sizes=4,2
    windows=1,8,2` has groups of 4 workers, pairs of these groups, and all. Groups are of workers that follow each
    other; what is left over is a smaller group. An update is one mean at any level; between two means over all, the
    groups have models of their own, and what is evaluated is the mean of the workers' models. The rule's buffers stay
    with the worker. Without sizes it is `averaging`. Differs from the papers: the means are exact and synchronous at
    every level, and each worker counts alike, whatever the size of its group.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    sizes: tuple[Count, ...] = (2,)
    windows: tuple[Count, ...] = (1, 8)
    fixed_order = True
    decentralised = True
    warnings = stability.synchronous
    family = "groups and hierarchies"
    good_for = "fast links inside nodes, slower ones between them, the slowest between sites"
    volume = "2 / first_window"
    limit = "lr * h < 2"
    equals = (
        "sizes= windows=10 is averaging with window=10; windows that are all 1, with sgd, are allreduce, up to rounding"
    )

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, **self.rule.cells(x0))

    async def step(self, w: Worker) -> None:
        await local_steps(w, self.rule, self.lr, self.windows[0])
        w.x = await w.mean(w.x, among=self.group(w.rank, w.workers, self.level(w.v)))
        w.v += 1

    def level(self, v: int) -> int:
        """The level of the mean that makes update v + 1: the highest whose turn it is."""
        return max(k for k in range(len(self.windows)) if (v + 1) % prod(self.windows[1 : k + 1]) == 0)

    def group(self, rank: int, workers: int, level: int) -> Sequence[int] | None:
        """The workers of a worker's group at a level; None: all."""
        size = prod(self.sizes[: level + 1])
        if level == len(self.sizes) or size >= workers:
            return None
        first = rank // size * size
        return range(first, min(first + size, workers))

    def donors(self, rank: int, workers: int) -> Sequence[int]:
        """The workers of the smallest group first: those of others may be at other steps."""
        groups = self.mean_groups(rank, workers)
        return sorted(range(workers), key=lambda other: sum(other not in group for group in groups))

    def mean_groups(self, rank: int, workers: int) -> Sequence[Sequence[int]]:
        groups = [self.group(rank, workers, level) for level in range(len(self.sizes))]
        return [group for group in groups if group is not None]

    def check(self, workers: int) -> None:
        if len(self.windows) != len(self.sizes) + 1:
            raise UsageError(
                f"hierarchical: {len(self.sizes)} sizes and all workers are {len(self.sizes) + 1} levels, and "
                f"{len(self.windows)} windows are given; give a window for each level"
            )

    def gradients_per_update(self, workers: int) -> float:
        return workers * self.windows[0]

    def vectors_per_gradient(self, workers: int) -> float:
        return evaluated(self.volume, {"first_window": self.windows[0]})
