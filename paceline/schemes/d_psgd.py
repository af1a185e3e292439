"""Decentralised parallel SGD: workers average with their neighbours in a graph."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from paceline import stability
from paceline.formula import evaluated
from paceline.ops import Met
from paceline.rules import SGD, Rule
from paceline.scheme import Rate, Scheme, State, Vector
from paceline.schemes._topologies import Topology, neighbours, second_eigenvalue
from paceline.worker import Worker

SLOW = 0.05  # a smaller gap of the mixing matrix is warned of: a ring has it from 17 workers on


@dataclass(frozen=True)
class DPSGD(Scheme, name="d-psgd"):
    """Decentralised parallel SGD: no server and no mean over all; each worker mixes with its neighbours.

    Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, 2017 (arXiv 1705.09056).

    worker:  order=cta:  g <- gradient(y);  y <- sum over j of W_ij * y_j - lr * g
    worker:  order=atc:  y <- y - lr * gradient(y);  y <- sum over j of W_ij * y_j

    W gives a worker and each of its neighbours the same weight. `cta` (combine, then adapt) is the paper's order: the
    vectors travel while the gradient is computed. Only `atc` with topology=full is synchronous SGD (up to rounding);
    topology=alone are independent runs. The model is the mean of the workers' models. A worker sends and receives its
    number of neighbours times d numbers per step. Differs from the paper: a step ends when all workers have met, not
    the neighbours only; the weight of a dead neighbour goes to the worker itself.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    topology: Topology = "ring"
    order: Literal["cta", "atc"] = "cta"
    decentralised = True
    compresses = ("meet",)
    family = "decentralised"
    good_for = "many equal workers on a network where each is close to few others"
    volume = "2 * degree"
    limit = "lr * h < 2; models differ by about lr / (1 - second eigenvalue of W)"
    equals = "order=atc topology=full is sync, up to rounding; topology=alone are independent runs; workers=1 is sgd"
    fixed_order = True

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, **self.rule.cells(x0))

    async def step(self, w: Worker) -> None:
        near = neighbours(self.topology, w.rank, w.workers)
        if self.order == "cta":
            meeting = await w.start(w.meet(w.x, near))
            g = await w.grad(w.x)
            w.x = self.mixed(w, await meeting)
            self.rule.apply(w.state, g, self.lr)
        else:
            g = await w.grad(w.x)
            self.rule.apply(w.state, g, self.lr)
            w.x = self.mixed(w, await w.meet(w.x, near))
        w.v += 1

    def mixed(self, w: Worker, met: Met) -> Vector:
        """The mean of the worker's own vector and its neighbours', added in the order of ranks."""
        members = (*neighbours(self.topology, w.rank, w.workers), w.rank)
        own = w.x if met.lost is None else w.x - met.lost  # as its neighbours have got it
        total: Vector | None = None
        for rank in sorted(members):
            y = met.vectors.get(rank, own)  # its own in place of that of a dead neighbour
            total = y.clone() if total is None else total.add_(y)
        assert total is not None
        total.div_(len(members))
        return total if met.lost is None else total.add_(met.lost)  # so that the sum of all models stays

    def gradients_per_update(self, workers: int) -> float:
        return workers

    def vectors_per_gradient(self, workers: int) -> float:
        return evaluated(self.volume, {"degree": len(neighbours(self.topology, 0, workers))})

    def warnings(self, workers: int, curvature: float | None) -> Iterator[str]:
        yield from stability.synchronous(self, workers, curvature)
        rho = second_eigenvalue(self.topology, workers)
        if self.topology != "alone" and 1 - rho < SLOW:
            yield (
                f"{workers} workers mix slowly in topology={self.topology}: the second eigenvalue is {rho:.3f}, and "
                f"the distance between their models grows as lr / {1 - rho:.3f}; topology=exponential mixes faster"
            )
