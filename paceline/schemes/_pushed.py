"""The fields and the step of asynchronous schemes that push every gradient with its version and its worker."""

from dataclasses import dataclass

from paceline import stability
from paceline.rules import SGD, Rule
from paceline.scheme import Rate, Scheme, State, Vector, on_server
from paceline.worker import Worker


@dataclass(frozen=True)
class Pushed(Scheme):
    """pull; one gradient; push it. What the server does with a push is the scheme's."""

    lr: Rate = 0.1
    rule: Rule = SGD()
    asynchronous = True
    compresses = ("push.g",)
    rule_at_server = True
    warnings = stability.asynchronous

    def server(self, x0: Vector, workers: int) -> State:
        return State(x=x0, workers=workers, **self.rule.cells(x0))

    @on_server(reads=True)
    def pull(self, s: State) -> tuple[Vector, int]:
        return s.x, s.v

    @on_server
    def push(self, s: State, g: Vector, v: int, rank: int) -> None:
        s.admit(v)
        self.rule.apply(s, g, self.lr)
        s.v += 1

    async def step(self, w: Worker) -> None:
        w.x, w.v = await self.pull()
        g = await w.grad(w.x)
        await self.push(g, w.v, w.rank)

    def gradients_per_update(self, workers: int) -> float | None:
        return 1
