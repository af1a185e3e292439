"""Asynchronous SGD that fears only large staleness: a smaller rate for it, or no use of it at all."""

from collections.abc import Iterator
from dataclasses import dataclass

from paceline import stability
from paceline.fields import Natural
from paceline.scheme import Count, State, Vector, on_server
from paceline.schemes._pushed import Pushed


@dataclass(frozen=True)
class DelayAdaptive(Pushed, name="delay-adaptive"):
    """Delay-adaptive asynchronous SGD: the rate falls as 1 / staleness for gradients that are older than usual.

    Koloskova, Stich, Jaggi 2022 (arXiv 2206.08307); Mishchenko, Bach, Even, Woodworth 2022 (arXiv 2206.07638).

    worker:  x, v <- pull();  g <- gradient(x);  push(g, v)
    server:  push: tau <- v_now - v;  x <- x - lr * g * bound / max(bound, tau);  v <- v + 1

    bound: the number of workers unless given. The gradient is scaled, not the rate: rules that divide a gradient's
    scale out, such as Adam, do not see it.
    """

    bound: Count | None = None
    family = "bounded or corrected staleness"
    good_for = "a few very slow workers among many: theory without a bound on the largest staleness"
    volume = "2"
    limit = "as async, whatever the largest staleness"
    equals = "a large bound is async; workers=1 is sgd"

    @on_server
    def push(self, s: State, g: Vector, v: int, rank: int) -> None:
        tau, bound = s.admit(v), self.bound or s.workers
        self.rule.apply(s, g if tau <= bound else g * (bound / tau), self.lr)
        s.v += 1


@dataclass(frozen=True)
class DropStale(Pushed, name="drop-stale"):
    """Asynchronous SGD with a bound on admitted staleness: an older gradient is dropped.

    The second rule of Koloskova, Stich, Jaggi 2022 (arXiv 2206.08307), section on dropped gradients.

    worker:  x, v <- pull();  g <- gradient(x);  push(g, v)
    server:  push: if v_now - v > bound: drop;  else x <- x - lr * g;  v <- v + 1

    bound: twice the number of workers unless given. bound=0 is sequential SGD by the fastest. `ringmaster` is the same
    with threshold = bound + 1, and can stop a gradient as soon as it is too old.
    """

    bound: Natural | None = None
    family = "bounded or corrected staleness"
    good_for = "workers that stall for a long time and must not undo what the others have done since"
    volume = "2"
    limit = "lr * h < 2 sin(pi / (2 (2 bound + 1))) whatever the workers do"
    equals = "a large bound is async; ringmaster with threshold = bound + 1 and stop=false; workers=1 is sgd"

    @on_server
    def push(self, s: State, g: Vector, v: int, rank: int) -> None:
        bound = 2 * s.workers if self.bound is None else self.bound
        if s.v - v > bound:
            s.refuse()
            return
        s.admit(v)
        self.rule.apply(s, g, self.lr)
        s.v += 1

    def warnings(self, workers: int, curvature: float | None) -> Iterator[str]:
        bound = 2 * workers if self.bound is None else self.bound
        return stability.asynchronous(self, min(workers, bound + 1), curvature)
