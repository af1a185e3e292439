"""Asynchronous decentralised parallel SGD: pairs of workers average their models."""

from dataclasses import dataclass
from typing import Literal

import torch

from paceline import stability
from paceline.rules import SGD, Rule
from paceline.sampling import mixed
from paceline.scheme import Rate, Scheme, State, Vector
from paceline.schemes._topologies import any_order
from paceline.worker import Worker

QUESTION, ANSWER = 0.0, 1.0  # the number of a message: it has a model, or what to add to one
NOT, GIVEN_UP = -1, 10  # no question is under way; the steps after which another one is asked


@dataclass(frozen=True)
class ADPSGD(Scheme, name="ad-psgd"):
    """Asynchronous decentralised parallel SGD: a worker averages its model with one other worker per step.

    Lian et al., Asynchronous Decentralized Parallel Stochastic Gradient Descent, 2018 (arXiv 1710.06952).

    worker:  g <- gradient(y);  j <- the partner of this step;  y_i, y_j <- (y_i + y_j) / 2;  y_i <- y_i - lr * g

    Averaging conserves the sum of all models. `partner=same-step`: partners meet at the same step, and models travel
    while both compute; no worker can wait for one that waits for it, and the run is the same each time. `pairs=random`:
    a random matching of all workers at each step, which every worker derives from the seed; `pairs=bipartite`: even
    ranks meet odd ranks in turn. `partner=any-step` is asynchronous, as in the paper: a worker sends its model to a
    random other one (`bipartite`: even ranks to odd ones), which averages at the end of whatever step it is in and
    sends back by how much; nobody waits, and a worker has one such question under way. The model is the mean of the
    workers' models. A worker sends and receives d numbers per step. Differs from the paper: with same-step a worker
    waits for its partner; with any-step it makes local steps until the answer is there, and asks another worker if
    there is none after 10.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    pairs: Literal["random", "bipartite"] = "random"
    partner: Literal["same-step", "any-step"] = "same-step"
    decentralised = True
    compresses = ("meet", "send")
    family = "decentralised"
    good_for = "many workers on a slow network: each exchanges one model per step, while it computes"
    volume = "2"
    limit = "lr * h < 2"
    equals = "workers=2 is d-psgd with topology=ring; workers=1 is sgd"
    fixed_order = True
    warnings = stability.synchronous

    def worker(self, x0: Vector, workers: int) -> State:
        asked = {"asked": NOT} if self.sends_messages() else {}  # the step of the question under way
        return State(x=x0, **asked, **self.rule.cells(x0))

    def sends_messages(self) -> bool:
        return self.partner == "any-step"

    def exact(self, workers: int) -> str | None:
        return any_order(self.name) if self.sends_messages() and workers > 1 else super().exact(workers)

    async def step(self, w: Worker) -> None:
        if self.sends_messages():
            await self.step_of_messages(w)
            return
        partner = self.partner_at(w.rank, w.workers, w.t, w.seed)
        meeting = None if partner is None else await w.start(w.swap(partner, w.x))
        g = await w.grad(w.x)
        if partner is not None and meeting is not None:
            met = await meeting
            y = met.vectors.get(partner)
            if y is not None:  # it is alive
                w.x = (w.x + y) / 2
                if met.lost is not None:  # the partner has got w.x - lost: the sum of both models stays
                    w.x += met.lost / 2
        self.rule.apply(w.state, g, self.lr)
        w.v += 1

    async def step_of_messages(self, w: Worker) -> None:
        g = await w.grad(w.x)
        for came in await w.receive():
            if came.number == ANSWER:
                w.x, w.asked = w.x + came.v, NOT
                continue
            half = (came.v - w.x) / 2  # what one gains, the other loses: the sum of all models stays
            if sent := await w.send(came.sender, -half, ANSWER):
                w.x = w.x + (half if sent.lost is None else half + sent.lost)
        self.rule.apply(w.state, g, self.lr)
        if w.asked == NOT or w.t - w.asked >= GIVEN_UP:
            other = self.any_other(w.rank, w.workers, w.t, w.seed)
            w.asked = w.t if other is not None and await w.send(other, w.x, QUESTION) else NOT
        w.v += 1

    def any_other(self, rank: int, workers: int, t: int, seed: int) -> int | None:
        """The worker that this one asks at step t; None if it asks nobody."""
        others = [r for r in range(workers) if r != rank]
        if self.pairs == "bipartite":
            others = [r for r in others if r % 2] if rank % 2 == 0 else []
        stream = torch.Generator().manual_seed(mixed(seed, "partner", rank, t))
        return others[int(torch.randint(len(others), (), generator=stream))] if others else None

    def partner_at(self, rank: int, workers: int, t: int, seed: int) -> int | None:
        """The worker that this one meets at step t; None: with an odd number of workers one is left over."""
        if self.pairs == "bipartite":
            half = (workers + 1) // 2
            hop = t % half
            other = 2 * ((rank // 2 + hop) % half) + 1 if rank % 2 == 0 else 2 * ((rank // 2 - hop) % half)
            return other if other < workers else None
        stream = torch.Generator().manual_seed(mixed(seed, "pairs", t))
        order = torch.randperm(workers, generator=stream).tolist()
        place = order.index(rank) ^ 1
        return order[place] if place < workers else None

    def gradients_per_update(self, workers: int) -> float:
        return workers
