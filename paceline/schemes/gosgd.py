"""Gossip SGD: now and then a worker sends its model to a random other one."""

from dataclasses import dataclass
from typing import Literal

import torch

from paceline import stability
from paceline.rules import SGD, Rule
from paceline.sampling import mixed
from paceline.scheme import Fraction, Rate, Scheme, State, Vector
from paceline.schemes._topologies import any_order
from paceline.worker import Worker


@dataclass(frozen=True)
class GoSGD(Scheme):
    """Gossip SGD: after a local step a worker sends its model and half of its weight to a random other worker.

    Blot, Picard, Thome, Cord, Distributed Optimization for Deep Learning with Gossip Exchange, 2018 (arXiv 1804.01852).

    worker:  for each (y_s, w_s) that came:  y <- (weight * y + w_s * y_s) / (weight + w_s);  weight <- weight + w_s
             y <- y - lr * gradient(y);  with probability p: weight <- weight / 2, send (y, weight) to a random r

    Conserves the sum of the weights, and of weight * y. p=0 are independent runs. `partner=any-step` is the paper's: a
    message is not waited for, and is received at whatever step its receiver is. What is under way counts in the sums,
    and a worker that dies keeps its weight. `partner=same-step`: a model is received at the step at which it was sent,
    after the gradient, so that the run is the same each time; a worker waits only at steps at which it sends or
    receives, and only for the workers of that exchange. The model is the mean of the workers' models. A worker sends
    and receives p times d numbers per step. Differs from the paper: who sends to whom at a step follows from the seed;
    a worker keeps what it would send to a dead one, or while 4 messages of its own are under way.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    p: Fraction = 0.1
    partner: Literal["same-step", "any-step"] = "same-step"
    decentralised = True
    compresses = ("meet", "send")
    family = "decentralised"
    good_for = "a network so slow that workers can exchange a model only now and then"
    volume = "2 * p"
    limit = "lr * h < 2"
    equals = "p=0 are independent runs; workers=1 is sgd"
    fixed_order = True
    warnings = stability.synchronous

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, weight=1.0, **self.rule.cells(x0))

    def sends_messages(self) -> bool:
        return self.partner == "any-step"

    def exact(self, workers: int) -> str | None:
        return any_order(self.name) if self.sends_messages() and workers > 1 else super().exact(workers)

    async def step(self, w: Worker) -> None:
        if self.sends_messages():
            for came in await w.receive():
                whole = w.weight + came.number
                w.x = (w.weight * w.x + came.number * came.v) / whole
                w.weight = whole
            self.rule.apply(w.state, await w.grad(w.x), self.lr)
            to = self.messages(w.workers, w.t, w.seed).get(w.rank)
            if to is not None and (gone := await w.send(to, w.x, w.weight / 2)):
                w.weight /= 2
                if gone.lost is not None:  # half of the weight has gone with x - lost
                    w.x += gone.lost
            w.v += 1
            return
        g = await w.grad(w.x)
        self.rule.apply(w.state, g, self.lr)
        sent = self.messages(w.workers, w.t, w.seed)
        to, of = sent.get(w.rank), [s for s, r in sent.items() if r == w.rank]
        if to is not None or of:
            others = connected(sent, w.rank)
            met = await w.meet(w.x, of, [] if to is None else [to], number=w.weight, among=others)
            weight, y = w.weight / 2 if to in met.present else w.weight, w.x
            if met.lost is not None and to in met.present:  # half of the weight has gone with y - lost
                y = y + met.lost
            for s, theirs in met.vectors.items():
                half = met.numbers[s] / 2
                y = (weight * y + half * theirs) / (weight + half)
                weight += half
            w.x, w.weight = y, weight
        w.v += 1

    def messages(self, workers: int, t: int, seed: int) -> dict[int, int]:
        """The workers that send at step t, and to whom."""
        stream = torch.Generator().manual_seed(mixed(seed, "gossip", t))
        chance = torch.rand(workers, generator=stream).tolist()
        hops = torch.randint(max(workers - 1, 1), (workers,), generator=stream).tolist()
        ranks = range(workers) if workers > 1 else ()
        return {s: (s + 1 + hops[s]) % workers for s in ranks if chance[s] < self.p}

    def gradients_per_update(self, workers: int) -> float:
        return workers


def connected(sent: dict[int, int], rank: int) -> list[int]:
    """The workers that a worker's exchange depends on: those who send to each other, directly or by others."""
    found = {rank}
    while more := {one for edge in sent.items() if found & {*edge} for one in edge} - found:
        found |= more
    return sorted(found)
