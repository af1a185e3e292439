"""The worker as a scheme's `step` sees it: identity, own cells, and the operations it may await."""

from collections.abc import Iterable
from typing import Any, TypeVar

import torch

from paceline.errors import SchemeError
from paceline.ops import Grad, Mean, Op, Sleep, Start
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

    def grad(self, x: Vector | None = None) -> Grad:
        """The gradient at x (by default at w.x) on the next mini-batch."""
        return Grad(self.state.x if x is None else x)

    def mean(self, v: Vector, weight: float = 1.0, among: Iterable[int] | None = None) -> Mean:
        """The mean of v over the living workers, or over those of the group `among`."""
        return Mean(v, weight, None if among is None else tuple(among))

    def sleep(self, seconds: float) -> Sleep:
        """Pause for some seconds."""
        return Sleep(seconds)

    def start(self, op: Op[R]) -> Start[R]:
        """Begin an operation without waiting: `pending = await w.start(op)`, later `await pending`."""
        return Start(op)
