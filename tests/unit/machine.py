"""An engine for tests, and schemes that write down what happens to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.compute_times import parse_times
from paceline.scheme import Scheme, State, Vector, on_server
from paceline.simulator.cost import Cost, parse_link
from paceline.simulator.engine import SimulationEngine
from paceline.simulator.faults import Fault
from paceline.task import Batch, Task
from paceline.tasks.quadratic import quadratic
from paceline.worker import Worker

Step = Callable[[Any, Worker], Any]


def engine(
    scheme: Scheme,
    *,
    workers: int = 2,
    compute: str = "constant:1.0",
    network: str = "",
    faults: Sequence[Fault] = (),
    shrink: bool = True,
    task: Task | None = None,
    servers: int = 1,
    checkpoint_every: int = 0,
    **cost: Any,
) -> SimulationEngine:
    task = task or quadratic(dim=4)
    prices = Cost(parse_times(compute), parse_link(network), **cost)
    return SimulationEngine(
        task,
        scheme,
        workers=workers,
        seed=0,
        cost=prices,
        faults=faults,
        shrink=shrink,
        servers=servers,
        checkpoint_every=checkpoint_every,
    )


def server_of(**cells: Any) -> Any:
    return lambda self, x0, workers: State(x=x0, **cells)


@dataclass(frozen=True)
class Logging(Scheme, name="logging"):
    """Has a push, a wait with a guard, and remembers who called."""

    def server(self, x0: Vector, workers: int) -> State:
        return State(x=x0, log=torch.full((64,), -1), got=0, open=0)

    def worker(self, x0: Vector, workers: int) -> State:
        return State(x=x0, begun=0, done=0)

    @on_server
    def push(self, s: State, g: Vector, who: int) -> None:
        s.log[s.got] = who
        s.got += 1
        s.x -= 0.1 * g
        s.v += 1

    @on_server
    def pull(self, s: State) -> Vector:
        x: Vector = s.x
        return x

    @on_server(when=lambda self, s, r: s.open >= r)
    def wait(self, s: State, r: int) -> None: ...

    @on_server(when=lambda self, s: s.v > 100)
    def never(self, s: State) -> None: ...


def scheme_with(step: Step) -> Scheme:
    @dataclass(frozen=True)
    class Mine(Logging, name="mine"):
        async def step(self, w: Worker) -> None:
            await step(self, w)

    return Mine()


def line_of(mark: str, file: str) -> str:
    """The place of the line that ends with a remark of these words."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    return f"{Path(file).name}:{1 + next(n for n, text in enumerate(lines) if text.endswith(f'# {mark}'))}"


def log(run: SimulationEngine) -> list[int]:
    kept: list[int] = run.centre.log[: run.centre.got].tolist()
    return kept


async def push_once(self: Any, w: Worker) -> None:
    g = await w.grad()
    await self.push(g, w.rank)


class Spoilt(Task):
    """The loss is not a number from the third mini-batch on."""

    name = "spoilt"
    batch = 1

    def __init__(self, loss: float = math.nan, batches: int = 10**9, error: Exception | None = None) -> None:
        self.bad, self.number, self.error = loss, batches, error

    def start(self, seed: int) -> Vector:
        return torch.ones(2)

    def batches(self, rank: int, workers: int, seed: int, first: int = 0) -> Iterator[Batch]:
        for number in count(first):
            if number == self.number:
                return
            yield Batch((), 1, number)

    def grad(
        self, x: Vector, batch: Batch, out: Vector | None = None, buffers: Mapping[str, Tensor] | None = None
    ) -> tuple[float, Vector]:
        assert out is not None
        out.copy_(x)
        if batch.seed == 2 and self.error is not None:
            raise self.error
        return (self.bad if batch.seed >= 2 else 1.0), out

    def evaluate(self, x: Vector, buffers: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        return {"loss": float(x.square().sum())}


def means(weights: Mapping[int, float] | None = None, among: Callable[[int], Any] = lambda rank: None) -> Scheme:
    """Everybody brings rank + 1; `x` is what came back."""

    @dataclass(frozen=True)
    class Means(Scheme, name="means"):
        async def step(self, w: Worker) -> None:
            await w.sleep(w.rank)
            weight = 1.0 if weights is None else weights[w.rank]
            w.x = await w.mean(torch.full((4,), w.rank + 1.0), weight, among(w.rank))
            w.v += 1

    return Means()


def got(run: SimulationEngine) -> list[float]:
    return [seat.worker.x[0].item() for seat in run.seats]
