"""A simulated worker's run as its hooks see it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from paceline.hook import Hook
from paceline.worker import Worker

if TYPE_CHECKING:
    from paceline.sim.engine import Engine


@dataclass(frozen=True)
class SimulatedSession:
    """The session of one worker; time is the engine's."""

    engine: Engine
    worker: Worker
    say: Callable[[str], None]

    @property
    def updates(self) -> int:
        return self.engine.updates

    @property
    def seconds(self) -> float:
        return self.engine.now

    def evaluate(self) -> dict[str, float]:
        return self.engine.evaluate()

    def stop(self, reason: str) -> None:
        self.engine.stopped = reason


class Hooked:
    """Hooks around a run: each worker gets its own copy of those that its role has."""

    def __init__(self, engine: Engine, hooks: Sequence[Hook], say: Callable[[str], None]) -> None:
        self._hooks: list[tuple[Hook, SimulatedSession]] = []
        for seat in engine.seats:
            session = SimulatedSession(engine, seat.worker, say)
            role = "chief" if seat.worker.rank == 0 else "worker"
            own = [copy.copy(hook) for hook in hooks if role in hook.roles]
            seat.before_step = [partial(hook.before_step, session) for hook in own]
            seat.after_step = [partial(hook.after_step, session) for hook in own]
            self._hooks += [(hook, session) for hook in own]

    def __enter__(self) -> None:
        for hook, session in self._hooks:
            hook.begin(session)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with ExitStack() as ends:  # every end runs, in reverse order, whatever another one raises
            for hook, session in self._hooks:
                ends.callback(hook.end, session)
            if error is not None:
                for hook, session in self._hooks:
                    hook.failed(session, error)
