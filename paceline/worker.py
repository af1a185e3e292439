"""The worker as a scheme's `step` sees it: identity, own cells, and the operations it may await."""

from collections.abc import Iterable
from typing import Any, TypeVar

import torch

from paceline.errors import SchemeError
from paceline.ops import Grad, Mean, Meet, Op, Receive, Send, Sleep, Start
from paceline.sampling import mixed
from paceline.state import State, Vector

R = TypeVar("R")

_OWN = frozenset({"alive", "loss", "rank", "seed", "state", "t", "workers", "_rng"})


class Worker:
    """`w` in a scheme file. `w.<cell>` is a cell of the worker's state; `w.t` counts its steps."""

    # tensor cells of the state are in __dict__ too: reading one must cost next to nothing
    __slots__ = ("__dict__", "_rng", "alive", "loss", "rank", "seed", "state", "t", "workers")

    def __init__(self, rank: int, workers: int, state: State, seed: int = 0) -> None:
        for name in state:
            if hasattr(Worker, name):
                raise SchemeError(f"a worker's cell cannot be called {name!r}: w.{name} is the worker's own")
        self.rank = rank
        self.workers = workers
        self.state = state
        self.seed = seed
        self.t = 0
        self.loss = float("nan")  # of the last gradient
        self.alive = True
        self._rng: torch.Generator | None = None
        self.__dict__.update({name: state.cell(name) for name in state if state.cell(name).dim()})

    @property
    def rng(self) -> torch.Generator:
        """The worker's own random stream."""
        if self._rng is None:
            self._rng = torch.Generator()
            self._rng.manual_seed(mixed(self.seed, "worker", self.rank))
        return self._rng

    def __getattr__(self, name: str) -> Any:
        return self.state.__getattr__(name)  # tensor cells are attributes, so this is a number

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.state, name, value)

    def grad(self, x: Vector | None = None, until: int | None = None, within: float | None = None) -> Grad:
        """The gradient at x (by default at w.x) on the next mini-batch. `until`: stop it when the server's version is
        there; `within`: stop it after this number of seconds. A stopped gradient is None."""
        return Grad(self.state.x if x is None else x, until, within)

    def mean(
        self,
        v: Vector,
        weight: float = 1.0,
        among: Iterable[int] | None = None,
        *,
        whole: bool = False,
        fragment: int | None = None,
    ) -> Mean:
        """The mean of v over the living workers, or over those of the group `among`. `whole`: v is never compressed,
        also if the scheme's means are. `fragment`: v is the fragment of this number in the scheme's `fragments_of`."""
        return Mean(v, weight, None if among is None else tuple(among), whole, fragment=fragment)

    def meet(
        self,
        v: Vector,
        of: Iterable[int],
        to: Iterable[int] | None = None,
        *,
        number: float = 1.0,
        among: Iterable[int] | None = None,
    ) -> Meet:
        """Meet the living workers, or those of the group `among`, at this step: give v and a number to the workers `to`
        (by default those of `of`), and take the vectors of the workers `of`."""
        taken = tuple(sorted({*of} - {self.rank}))
        given = taken if to is None else tuple(sorted({*to} - {self.rank}))
        return Meet(v, given, taken, self.t, number, None if among is None else tuple(sorted(among)))

    def swap(self, peer: int, v: Vector, number: float = 1.0) -> Meet:
        """Meet one other worker at this step, and nobody else: give it v, and take its vector."""
        return self.meet(v, (peer,), number=number, among=(self.rank, peer))

    def send(self, to: int, v: Vector, number: float = 1.0) -> Send:
        """Send v and a number to another worker, without waiting for it: the message leaves when this step ends. False
        if it is not sent, because that worker is dead or has ended, or too many messages of this one are under way."""
        return Send(to, v, number)

    def receive(self) -> Receive:
        """The messages that have come since the last time, possibly none. It never waits."""
        return Receive()

    def sleep(self, seconds: float) -> Sleep:
        """Pause for some seconds."""
        return Sleep(seconds)

    def start(self, op: Op[R]) -> Start[R]:
        """Begin an operation without waiting: `pending = await w.start(op)`, later `await pending`."""
        return Start(op)
