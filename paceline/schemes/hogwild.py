"""HogWild: one shared vector, no lock."""

from dataclasses import dataclass

from paceline import stability
from paceline.errors import UsageError
from paceline.rules import SGD, Rule
from paceline.scheme import Count, Rate, Scheme, State, Vector, on_server
from paceline.worker import Worker


@dataclass(frozen=True)
class HogWild(Scheme):
    """HogWild!: workers read and add in one shared vector without any lock.

    Recht, Re, Wright, Niu 2011 (arXiv 1106.5730).

    worker:  x <- read (possibly torn);  g <- gradient(x);  x[j] <- x[j] - lr * g[j] for each j, while others write too

    In virtual time the vector is split into `chunks`, each read or written at once: reads and adds of different workers
    interleave chunk by chunk, at the speed of the simulator's `access` law and the worker. A worker that overtakes
    another one reads a torn vector; with constant and equal times none does. One chunk is asynchronous SGD, one worker
    SGD. Processes of one machine compute at the shared vector itself, which others change meanwhile. Differs from the
    paper: gradients are dense, so every coordinate is written, the zeros too.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    chunks: Count = 8
    asynchronous = True
    compresses = ("add.g",)
    rule_at_server = True
    reads_in_place = True
    warnings = stability.asynchronous
    family = "asynchronous"
    good_for = "small models in the memory of one machine"
    volume = "2"
    limit = "as async"
    equals = "chunks=1 is async; workers=1 is sgd"

    def server(self, x0: Vector, workers: int) -> State:
        return State(x=x0, **self.rule.cells(x0))

    @on_server(atomic=False)
    def read(self, s: State) -> tuple[Vector, int]:
        return s.x, s.v

    @on_server(atomic=False)
    def add(self, s: State, g: Vector, v: int) -> None:
        s.admit(v)
        self.rule.apply(s, g, self.lr)
        s.v += 1

    def check(self, workers: int) -> None:
        if not self.rule.prepared:
            raise UsageError(
                f"hogwild: the memory of the rule {self.rule.name!r} begins with its first update, which no worker of "
                "hogwild makes alone; use sgd, momentum, nesterov, adagrad, rmsprop, adam or adamw"
            )

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.read()
        g = await w.grad(w.x)
        await self.add(g, w.v)

    def gradients_per_update(self, workers: int) -> float:
        return 1
