"""What the schemes share that take a window of local steps between a pull and a push."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline import stability
from paceline.rules import SGD, Rule
from paceline.scheme import Count, Rate, Scheme, State, Vector, on_server
from paceline.worker import Worker


@dataclass(frozen=True)
class Windowed(Scheme):
    """pull; `window` local steps on fresh mini-batches from a real local iterate; push what they did.

    What is pushed is in units of a gradient (see rules.Window), so the server's rule at rate lr adds the workers' way.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    server_rule: Rule = SGD()
    window: Count = 5
    asynchronous = True

    def server(self, x0: Vector, workers: int) -> State:
        return State(x=x0, **self.server_rule.cells(x0))

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, **self.rule.cells(x0))

    @on_server(reads=True)
    def pull(self, s: State) -> tuple[Vector, int]:
        return s.x, s.v

    async def local_steps(self, w: Worker) -> Vector:
        """y <- y - lr * g, `window` times; gives the sum of the g."""
        steps = self.rule.window(w.state, self.lr)
        for _ in range(self.window):
            steps.step(await w.grad(w.x))
        return steps.sum

    def gain(self, curvature: float) -> float:
        """The share of the distance that one push covers on a quadratic."""
        local, central = self.rule.rate(self.lr), self.server_rule.rate(self.lr)
        return stability.window_gain(local * curvature, self.window) * (central / local if local else 0.0)

    def warnings(self, workers: int, curvature: float | None) -> Iterator[str]:
        if curvature is not None and type(self.rule) is SGD and type(self.server_rule) is SGD:
            gain = self.gain(curvature)
            yield from stability.asynchronous(gain, workers, f"the gain of a window of {self.window}")
        yield from stability.asynchronous_momentum(getattr(self.server_rule, "momentum", 0.0), workers)
