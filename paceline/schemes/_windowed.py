"""The server's side and the fields of schemes with a window of local steps between a pull and a push."""

from dataclasses import dataclass

from paceline import stability
from paceline.rules import SGD, Rule
from paceline.scheme import Count, Rate, Scheme, State, Vector, on_server
from paceline.stability import Gain


@dataclass(frozen=True)
class Windowed(Scheme):
    """pull; `window` local steps on fresh mini-batches from the worker's own y; push the sum of their gradients.

    The sum is in units of a gradient (see rules.Window), so the server's rule at rate lr moves x as far as y moved.
    """

    lr: Rate = 0.1
    rule: Rule = SGD()
    server_rule: Rule = SGD()
    window: Count = 5
    asynchronous = True
    warnings = stability.asynchronous

    def server(self, x0: Vector, workers: int) -> State:
        return State(x=x0, **self.server_rule.cells(x0))

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, **self.rule.cells(x0))

    @on_server(reads=True)
    def pull(self, s: State) -> tuple[Vector, int]:
        return s.x, s.v

    def gradients_per_update(self, workers: int) -> float:
        return self.window

    def gain(self, workers: int, curvature: float) -> Gain | None:
        return stability.windowed(self, curvature)
