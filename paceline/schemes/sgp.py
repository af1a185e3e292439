"""Stochastic gradient push: push-sum averaging over a directed graph."""

from dataclasses import dataclass
from typing import Literal

from paceline import stability
from paceline.formula import evaluated
from paceline.rules import SGD, Rule
from paceline.scheme import Rate, Scheme, State, Vector
from paceline.schemes._topologies import hops
from paceline.worker import Worker


@dataclass(frozen=True)
class SGP(Scheme):
    """Stochastic gradient push: each worker pushes half of its model and of its weight to one other worker.

    Assran et al., Stochastic Gradient Push for Distributed Deep Learning, 2019 (arXiv 1811.10792).

    worker:  y <- y - lr * gradient(z);  send (y / 2, weight / 2) to worker i + 2^(t mod log2 N);
             y <- y / 2 + what came;  weight <- weight / 2 + what came;  z <- y / weight

    The sum of the weights is the number of workers as long as nobody dies, and mixing conserves the sum of y. With 2^k
    workers, k steps average exactly. `topology=full` pushes to all, which is synchronous SGD (up to rounding). With
    `overlap` y travels while the gradient is computed: the gradient of a step is taken before what came in it is
    added, and enters after. The model is the mean of z over the workers. A worker sends and receives d numbers per step
    (full: N - 1 times d). Differs from the paper: a step ends when all workers have met; a worker keeps what it would
    send to a dead one; late messages are at most one step late.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    topology: Literal["exponential", "full"] = "exponential"
    overlap: bool = False
    decentralised = True
    compresses = ("meet",)
    family = "decentralised"
    good_for = "many equal workers: as little traffic as in pairs, and nearly the model of all"
    volume = "2 * degree"
    limit = "lr * h < 2"
    equals = "topology=full is sync, up to rounding; workers=1 is sgd; 2^k workers average exactly in k steps"
    fixed_order = True
    warnings = stability.synchronous

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, weight=1.0, **self.rule.cells(x0))  # x is the numerator y

    def model(self, s: State) -> Vector:
        z: Vector = s.x / s.weight
        return z

    async def step(self, w: Worker) -> None:
        to, of = self.peers(w.rank, w.workers, w.t)
        if self.overlap:
            meeting = await w.start(w.meet(w.x, of, to, number=w.weight))
            g = await w.grad(w.x / w.weight)
            met = await meeting
        else:
            g = await w.grad(w.x / w.weight)
            self.rule.apply(w.state, g, self.lr)
            met = await w.meet(w.x, of, to, number=w.weight)
        share = 1 / (1 + len(to))
        kept = 1 - share * sum(rank in met.present for rank in to)
        w.x, w.weight = (
            kept * w.x + share * sum(met.vectors.values()),
            kept * w.weight + share * sum(met.numbers[rank] for rank in met.vectors),
        )
        if met.lost is not None:  # what the others did not get stays here, so that the sum of y does
            w.x += (1 - kept) * met.lost
        if self.overlap:
            self.rule.apply(w.state, g, self.lr)
        w.v += 1

    def peers(self, rank: int, workers: int, t: int) -> tuple[set[int], set[int]]:
        """The workers that this one sends to at step t, and those that it receives from."""
        if self.topology == "full":
            others = set(range(workers)) - {rank}
            return others, others
        around = hops(workers)
        hop = around[t % len(around)]
        return ({(rank + hop) % workers}, {(rank - hop) % workers}) if workers > 1 else (set(), set())

    def vectors_per_gradient(self, workers: int) -> float:
        return evaluated(self.volume, {"degree": len(self.peers(0, workers, 0)[0])})

    def gradients_per_update(self, workers: int) -> float:
        return workers
