"""MindFlayer SGD: gradients that take too long are given up and tried again."""

from dataclasses import dataclass

import torch

from paceline import stability
from paceline.rules import SGD, Rule
from paceline.scheme import Count, Rate, Scheme, State, Vector, on_server
from paceline.worker import Worker


@dataclass(frozen=True)
class MindFlayer(Scheme, name="mindflayer"):
    """MindFlayer SGD: rounds of tries; a try that is not done in time is stopped, and the mean makes up for it.

    Maranjyan, Shaikh Omar, Richtarik, MindFlayer SGD: Efficient Parallel SGD in the Presence of Heterogeneous and
    Random Worker Compute Times, 2024 (arXiv 2410.04285).

    worker:  x, v <- pull(i) once it has tries left in this round;  g <- gradient(x), stopped after `deadline` seconds
             push(g, v, i), or miss(i) if it was stopped
    server:  push: total <- total + g;  done_i <- done_i + 1;  miss: nothing;  both: tried_i <- tried_i + 1
             when every worker has made `tries`: p_i <- share of its tries that were in time, over the whole run
             x <- x - lr * total / (sum over i of p_i * tries);  v <- v + 1;  a new round

    `deadline` 0, the default, stops nothing. In processes a gradient is stopped between two layers, and by tasks that
    cannot stop at its end. Checked against public summaries and the public reviews of the paper, which describe its
    listing: tries that are stopped and made again, workers that wait for the others when theirs are made, one update
    per round, and the division by the expected number of gradients. Differs from the paper: one time limit and one
    number of tries for all workers, and p_i, its chance to be in time, is counted during the run, not known. A round
    without any gradient changes nothing.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    deadline: Rate = 0.0
    tries: Count = 1
    rule_at_server = True
    compresses = ("push.g",)
    warnings = stability.synchronous
    family = "optimal time"
    good_for = "compute times with heavy tails, whose slowest gradients are best restarted"
    volume = "2"
    limit = "lr * h < 2, times the chance of rounds with more gradients than expected"
    equals = "deadline=0 is sync of tries * workers gradients, up to rounding; workers=1, tries=1 is sgd"

    def server(self, x0: Vector, workers: int) -> State:
        none = torch.zeros(workers, dtype=torch.int64)
        return State(
            x=x0,
            total=torch.zeros_like(x0),
            given=0,  # gradients in this round
            remaining=none + self.tries,  # tries of this round
            tried=none,
            done=none,
            alive=none + 1,
            **self.rule.cells(x0),
        )

    @on_server(reads=True, when=lambda self, s, i: s.remaining[i] > 0)
    def pull(self, s: State, i: int) -> tuple[Vector, int]:
        return s.x, s.v

    @on_server
    def push(self, s: State, g: Vector, v: int, i: int) -> None:
        if v < s.v or not s.remaining[i]:
            s.refuse()
            return
        s.admit(v)
        s.total = s.total + g if s.given else g
        s.given += 1
        s.done[i] += 1
        self._tried(s, i)

    @on_server
    def miss(self, s: State, v: int, i: int) -> None:
        if v == s.v and s.remaining[i]:
            self._tried(s, i)

    def _tried(self, s: State, i: int) -> None:
        s.tried[i] += 1
        s.remaining[i] -= 1
        self._close(s)

    def _close(self, s: State) -> None:
        """End the round if no living worker has tries left."""
        if (s.remaining * s.alive).any() or not s.tried.any():
            return
        if s.given:
            made = self.tries - s.remaining  # a worker that has died has made fewer
            expected = float((made * s.done / s.tried.clamp_min(1)).sum())
            self.rule.apply(s, s.total / expected, self.lr)
            s.v += 1
        s.given = 0
        s.remaining = self.tries

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull(w.rank)
        g = await w.grad(w.x, within=self.deadline or None)
        if g is None:
            await self.miss(w.v, w.rank)
        else:
            await self.push(g, w.v, w.rank)

    def left(self, s: State, rank: int) -> None:
        s.alive[rank] = 0
        self._close(s)

    def joined(self, s: State, rank: int) -> None:
        s.alive[rank] = 1

    def exact(self, workers: int) -> str:
        return "gradients are added in the order in which they come"
