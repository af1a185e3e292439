"""DASO: nodes that are synchronous inside exchange their models now and then, without waiting for the network."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline import stability
from paceline.errors import UsageError
from paceline.fields import Natural
from paceline.rules import SGD, Rule
from paceline.scheme import Count, Rate, Scheme, State, Vector
from paceline.schemes._local import local_steps
from paceline.worker import Worker

THRESHOLD, PATIENCE = 0.05, 2  # a plateau: the loss falls by less than this part, this number of times in a row


@dataclass(frozen=True)
class DASO(Scheme, name="daso"):
    """DASO: workers of a node average their models at every step; all workers do so every `skip` batches, overlapped.

    Coquelin et al., Accelerating neural network training with distributed asynchronous and selective optimization, 2021
    (arXiv 2104.05588).

    worker:  every `skip` batches: start z <- mean of y over all workers
             `wait` times: y <- y - lr * gradient(y)
             if z was started: y <- (2 * wait * y + nodes * z) / (2 * wait + nodes)
             y <- mean of y over the workers of the node

    A node is `size` workers that follow each other. wait=0, the first `warmup` updates and those from `cooldown` on are
    blocking: y <- mean of y over all workers, at every step of warm-up and cool-down. With adapt_every=n the loss is
    looked at after every n exchanges: on a plateau `skip` is halved, and after 1 it starts again (`wait` shrinks with
    it, down to 1). What is evaluated is the mean of the workers' models. Differs from the paper: `wait` is also the
    number of batches between two means inside a node, because a worker has one mean under way at a time; all workers of
    a node take part in an exchange, in place of one and a broadcast; a plateau is measured in exchanges, not in epochs,
    and warm-up and cool-down in updates; nothing is rounded to bf16.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    size: Count = 2
    skip: Count = 4
    wait: Natural = 1
    warmup: Natural = 0
    cooldown: Count | None = None
    adapt_every: Natural = 0
    fixed_order = True
    decentralised = True
    warnings = stability.synchronous
    family = "groups and hierarchies"
    good_for = "fast links inside nodes, and slow ones between them that nobody should wait for"
    volume = "2 / max(wait, 1) + min(wait, 1) * 2 / skip"
    limit = "lr * h < 2"
    equals = "skip=1 wait=0 is averaging with window=1; one node is averaging with window=wait"

    def worker(self, x0: Vector, workers: int) -> State:
        adapts = {"best": float("inf"), "plateau": 0, "exchanges": 0} if self.adapt_every else {}
        return State(x=x0, skip=self.skip, to_skip=0, **adapts, **self.rule.cells(x0))

    async def step(self, w: Worker) -> None:
        node, batches = self.node(w.rank, w.workers), max(1, self.wait * w.skip // self.skip)
        nodes = -(-w.workers // self.size)
        steady = w.v < self.warmup or (self.cooldown is not None and w.v >= self.cooldown)
        exchange = nodes > 1 and (steady or w.to_skip <= 0)
        blocking = exchange and (steady or self.wait == 0)
        pending = await w.start(w.mean(w.x)) if exchange and not blocking else None
        await local_steps(w, self.rule, self.lr, batches)
        if pending is not None:
            z = await pending
            w.x = (2 * batches * w.x + nodes * z) / (2 * batches + nodes)
        w.x = await w.mean(w.x, among=None if blocking else node)
        if exchange and not steady and self.adapt_every:
            await self._look(w)
        w.to_skip = (w.skip if exchange else w.to_skip) - batches
        w.v += 1

    async def _look(self, w: Worker) -> None:
        """Halve `skip` where the loss has stopped falling. All workers decide alike: by the mean of their losses."""
        w.exchanges += 1
        if w.exchanges % self.adapt_every:
            return
        loss = float(await w.mean(w.x.new_tensor([w.loss]), whole=True))
        w.plateau = 0 if loss < (1 - THRESHOLD) * w.best else w.plateau + 1
        w.best = min(w.best, loss)
        if w.plateau >= PATIENCE:
            w.plateau, w.skip = 0, w.skip // 2 if w.skip > 1 else self.skip

    def node(self, rank: int, workers: int) -> range:
        """The workers of a worker's node."""
        first = rank // self.size * self.size
        return range(first, min(first + self.size, workers))

    def donors(self, rank: int, workers: int) -> Sequence[int]:
        """The workers of the node first: those of others may be at other steps."""
        node = self.node(rank, workers)
        return sorted(range(workers), key=lambda other: other not in node)

    def mean_groups(self, rank: int, workers: int) -> Sequence[Sequence[int]]:
        return [self.node(rank, workers)]

    def check(self, workers: int) -> None:
        if self.skip % max(self.wait, 1):
            raise UsageError(
                f"daso: skip is {self.skip} and wait is {self.wait}; give a skip that is a multiple of wait: "
                "exchanges begin between two steps, of `wait` batches each"
            )

    def gradients_per_update(self, workers: int) -> float | None:
        return None if self.adapt_every and self.wait > 1 else workers * max(self.wait, 1)
