"""A simulated worker's run as its hooks see it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paceline.config.build import scheme_of, value_of
from paceline.errors import UsageError
from paceline.hook import Hook
from paceline.result import Staleness
from paceline.runtime.hook_calls import HookCalls
from paceline.state import Vector
from paceline.worker import Worker

if TYPE_CHECKING:
    from paceline.simulator.engine import SimulationEngine


@dataclass(frozen=True)
class SimulatedSession:
    """The session of one worker; time is the engine's."""

    engine: SimulationEngine
    worker: Worker
    say: Callable[[str], None]
    _kept: dict[str, Tensor] = field(default_factory=dict)

    @property
    def updates(self) -> int:
        return self.engine.updates

    @property
    def seconds(self) -> float:
        return self.engine.now

    @property
    def samples(self) -> int:
        return self.engine.samples

    @property
    def bytes_sent(self) -> int:
        return sum(seat.driver.traffic.sent for seat in self.engine.seats)

    @property
    def bytes_received(self) -> int:
        return sum(seat.driver.traffic.received for seat in self.engine.seats)

    @property
    def staleness(self) -> Staleness:
        return self.engine.staleness

    @property
    def directory(self) -> Path | None:
        return None

    def gradient_norm(self) -> float:
        return self.engine.seats[self.worker.rank].norm.read()

    def model(self) -> Vector:
        return self.engine.model().to("cpu", copy=True)

    def trained_model(self) -> Any:
        return self.engine.task.trained_model(self.model(), self.engine.model_buffers())

    def evaluate(self, x: Vector | None = None) -> dict[str, float]:
        return self.engine.evaluate(x)

    def record(self, values: dict[str, float]) -> None:
        self.engine.recorded.append({"update": self.updates, "seconds": self.seconds, **values})

    def stop(self, reason: str) -> None:
        if self.engine.stopped is None:  # the first reason counts
            self.engine.stopped = reason

    def leave(self, reason: str) -> None:
        self.engine.seats[self.worker.rank].leaves = reason

    def save(self) -> None:
        raise UsageError("the simulator writes no checkpoints; a hook that saves needs real processes: paceline train")

    def keep(self, name: str, tensor: Tensor) -> None:
        self._kept[name] = tensor

    def kept(self, name: str) -> Tensor | None:
        return None  # a simulation is never resumed from a checkpoint

    def set(self, **hyper: Any) -> None:
        """For this worker from its next step on; at the server from the next call on."""
        engine, rank = self.engine, self.worker.rank
        driver = engine.seats[rank].driver
        changed = scheme_of(driver.scheme, hyper)
        changed.check(engine.workers)
        driver.scheme = changed
        if rank == 0 and engine.servers is not None:
            engine.servers.set(scheme_of(engine.servers.scheduler.scheme, hyper))

    def value(self, key: str) -> Any:
        return value_of(self.engine.seats[self.worker.rank].driver.scheme, key)

    def wait(self, condition: Callable[[], bool], what: str, *, away: bool = False) -> None:
        if not condition():
            raise UsageError(
                f"worker:{self.worker.rank} would wait for {what}; virtual time stands still inside a hook, so one "
                "that waits needs real processes: paceline train"
            )

    def begun(self) -> int:
        return self.engine.workers


@contextmanager
def hooked(engine: SimulationEngine, hooks: Sequence[Hook], say: Callable[[str], None]) -> Iterator[None]:
    """Hooks around a run: each worker gets its own copy of those that its role has."""
    for seat in engine.seats:
        role = "worker" if seat.worker.rank else "chief"
        own = [copy.copy(hook) for hook in hooks if role in hook.roles]
        seat.hooks = HookCalls(own, SimulatedSession(engine, seat.worker, say))
    calls = [seat.hooks for seat in engine.seats]
    with ExitStack() as ends:
        for one in calls:
            ends.callback(one.end)
        try:
            for one in calls:
                one.begin()
            yield
        except BaseException as error:
            for one in calls:
                ends.callback(one.failed, error)
            raise
