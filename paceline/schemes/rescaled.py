"""Rescaled ASGD: slow workers push seldom, and so count more each time."""

from dataclasses import dataclass

import torch

from paceline.errors import UsageError
from paceline.scheme import Fraction, Rate, State, Vector, on_server
from paceline.schemes._pushed import Pushed


@dataclass(frozen=True)
class Rescaled(Pushed):
    """Rescaled ASGD: a worker's rate is proportional to the time that it takes, so all workers count alike.

    Rescaled ASGD, 2026 (arXiv 2605.13434), for the rule; its normalisation here keeps the mean rate at lr.

    worker:  x, v <- pull();  g <- gradient(x);  push(g, v, i)
    server:  push: e_i <- e_i + ema * (v_now - v + 1 - e_i);  x <- x - lr * (e_i / workers) * g;  v <- v + 1

    e_i, the mean of staleness + 1, is the worker's time in units of updates: its mean is exactly the sum of all
    workers' speeds over its own, whatever the laws of times, so no clock is needed and a replay finds the same. It
    starts at the number of workers, and a worker's first push is not measured. `times` gives known times instead.
    Differs from the paper, which takes measured times.
    """

    ema: Fraction = 0.02
    times: tuple[Rate, ...] = ()
    fair = True
    family = "optimal time"
    good_for = "data that differ between workers of different speeds: async without its bias to the fast"
    volume = "2"
    limit = "lr * h * (slowest time / harmonic mean of times) below the limit of async"
    equals = "equal times are async"

    def server(self, x0: Vector, workers: int) -> State:
        takes = torch.full((workers,), float(workers), dtype=torch.float64)
        if self.times:
            times = torch.tensor(self.times, dtype=torch.float64)
            takes = times * (1 / times).sum()
        pushed = torch.zeros(workers, dtype=torch.int64)
        return State(x=x0, workers=workers, takes=takes, pushed=pushed, **self.rule.cells(x0))

    uncut = frozenset({"takes"})

    @on_server
    def push(self, s: State, g: Vector, v: int, rank: int) -> None:
        between = s.admit(v) + 1
        if s.pushed[rank] and not self.times:
            s.takes[rank] += self.ema * (between - s.takes[rank])
        s.pushed[rank] = 1
        self.rule.apply(s, g * (float(s.takes[rank]) / s.workers), self.lr)
        s.v += 1

    def check(self, workers: int) -> None:
        if self.times and (len(self.times) != workers or min(self.times) <= 0):
            raise UsageError(f"rescaled: times are seconds above 0, one for each of {workers} workers")
        if not self.rule.linear:
            raise UsageError(
                f"rescaled: the rule {self.rule.name!r} divides the scale of a gradient out, so rates per worker would "
                "do nothing; use sgd, momentum or nesterov"
            )
