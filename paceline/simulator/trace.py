"""Records the timeline of a simulation: what each worker awaits, from when to when, and for whom it waits.

Methods of the engine are replaced by ones that record. A simulation without a timeline has none of this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.ops import Call, Grad, Mean, Meet, Op, Pending
from paceline.runtime.timeline import RUN, Interval, Timeline
from paceline.simulator.faults import Fault, FaultTarget
from paceline.simulator.simulated_worker import SimulatedWorker

if TYPE_CHECKING:
    from paceline.simulator.engine import SimulationEngine


@dataclass(slots=True, eq=False)
class _Flight:
    """An operation under way: when it was issued, arrives, was performed, and is complete."""

    start: float
    arrives: float
    performed: float | None = None
    end: float | None = None
    by: int | None = None  # the worker whose arrival let it be performed
    background: bool = True


@dataclass(slots=True, eq=False)
class _Awaited:
    """What a worker does now."""

    kind: str
    start: float
    target: Pending[Any] | None = None


class SimulationTrace:
    """Attached to an engine before its first event. `finish` closes what is under way at the end."""

    def __init__(self, timeline: Timeline, engine: SimulationEngine) -> None:
        self._timeline, self._engine = timeline, engine
        self._awaited: dict[int, _Awaited] = {}
        self._flights: list[dict[Pending[Any], _Flight]] = [{} for _ in range(engine.workers)]
        self._arriving: int | None = None  # the worker whose call, mean or meeting has arrived last
        self._messages = {engine.on_call, engine.on_mean, engine.on_meet}
        self._replies = {engine.on_answer, engine.on_met}
        self._watch_engine(engine)
        self._watch_failures(engine)

    def _watch_engine(self, engine: SimulationEngine) -> None:
        later, resume, run = engine.later, engine.resume, engine.run

        def traced_later(seat: SimulatedWorker, seconds: float, handler: Callable[..., None], *payload: Any) -> None:
            self._scheduled(seat.worker.rank, seconds, handler, payload)
            later(seat, seconds, handler, *payload)

        def traced_resume(seat: SimulatedWorker, answer: Any = None) -> None:
            self._close(seat.worker.rank)
            resume(seat, answer)
            self._open(seat)

        def traced_run(updates: int | None = None, *, watch: Any = None, watch_every: int = 1, **rest: Any) -> None:
            def updated(engine: SimulationEngine) -> None:
                self._mark("server:0" if engine.servers is not None else RUN, "update", str(engine.updates))
                if watch is not None:
                    watch(engine)

            run(updates, watch=updated, **rest)

        engine.later, engine.resume, engine.run = traced_later, traced_resume, traced_run  # type: ignore[method-assign]
        _replace(engine.means, "arrive", self._arrived)
        _replace(engine.meetings, "arrive", self._arrived)
        if engine.servers is not None and not engine.servers.followers:
            _replace(engine, "_submit", self._arrived)

    def _watch_failures(self, engine: SimulationEngine) -> None:
        injector, recovery = engine.injector, engine.recovery
        kill, restart, tear, restore = injector.kill, injector.restart, recovery.tear, recovery.restore

        def traced_kill(rank: int) -> None:
            before, self._arriving = self._living(), rank
            kill(rank)
            for one in sorted(before - self._living()):
                self._interrupt(one, "dead")
                self._mark(f"worker:{one}", "kill")

        def traced_restart(rank: int) -> None:
            before = self._living()
            restart(rank)
            for one in sorted(self._living() - before):
                self._interrupt(one, "return")
                self._mark(f"worker:{one}", "restart")

        def traced_tear(*shard: Any) -> None:
            tear(*shard)
            for one in sorted(self._living()):
                self._interrupt(one, "return")

        def traced_restore() -> None:
            self._mark(RUN, "return", f"to update {recovery.newest.update}")
            restore()

        injector.kill, injector.restart = traced_kill, traced_restart  # type: ignore[method-assign]
        recovery.tear, recovery.restore = traced_tear, traced_restore  # type: ignore[method-assign, assignment]
        _replace(recovery, "_over", lambda: self._mark(RUN, "checkpoint", f"of update {recovery.newest.update}"))
        if engine.servers is not None:
            _replace(engine.servers, "kill", lambda shard: self._mark(f"server:{shard}", "kill"))
        _replace(injector, "_strike_server", self._struck_server)
        _replace(injector, "_hold_up", self._held_up)
        _replace(injector, "_partition", self._parted)

    def _living(self) -> set[int]:
        return {seat.worker.rank for seat in self._engine.seats if seat.worker.alive}

    def _arrived(self, rank: int, *_: Any) -> None:
        self._arriving = rank

    def _struck_server(self, fault: Fault, until: float) -> None:
        if fault.action != "kill":  # its death is marked where it happens
            self._mark(f"server:{fault.rank}", fault.action, f"until {until:g}" if fault.action == "stop" else "")

    def _held_up(self, seat: SimulatedWorker, fault: Fault, until: float) -> None:
        self._mark(f"worker:{seat.worker.rank}", fault.action, f"until {until:g}" if fault.duration else "one message")

    def _parted(self, one: FaultTarget, other: FaultTarget | None, until: float) -> None:
        far = "all others" if other is None else f"{other.role}:{other.index}"
        self._mark(f"{one.role}:{one.index}", "partition", f"from {far} until {until:g}")

    def _mark(self, role: str, kind: str, detail: str = "") -> None:
        self._timeline.mark(role, kind, self._engine.now, detail)

    def _scheduled(self, rank: int, seconds: float, handler: Callable[..., None], payload: Any) -> None:
        """An operation is issued, or its reply is on the way."""
        target = next((one for one in payload if isinstance(one, Pending)), None)
        if target is None:
            return
        now, flights = self._engine.now, self._flights[rank]
        if target not in flights:
            flight = flights[target] = _Flight(now, now + seconds if handler in self._messages else now)
            if handler not in self._messages:  # a gradient, a sleep, a call that changes the vector piece by piece
                flight.performed, flight.end = now, now + seconds
        elif handler in self._replies:
            flights[target].performed, flights[target].end = now, now + seconds
            flights[target].by = self._arriving
        elif not isinstance(target.op, Grad):  # a piece of the vector; that a gradient is stopped shows when it is
            flights[target].end = now + seconds

    def _open(self, seat: SimulatedWorker) -> None:
        """A worker has run until it has to wait."""
        rank, target, now = seat.worker.rank, seat.waits_for, self._engine.now
        if rank in self._awaited or not seat.worker.alive or seat.parked:
            return
        if target is None:  # between two steps
            self._awaited[rank] = _Awaited("return" if self._engine.recovery.returning else "checkpoint", now)
            return
        self._awaited[rank] = _Awaited(_kind(target.op), now, target)
        flight = self._flights[rank].get(target)
        if flight is not None and flight.start == now:
            flight.background = False

    def _close(self, rank: int, lost: str = "") -> None:
        """A worker goes on, or is interrupted."""
        awaited, now = self._awaited.pop(rank, None), self._engine.now
        flights = self._flights[rank]
        if awaited is not None:
            self._emit(rank, awaited, lost)
        for target, flight in list(flights.items()):
            if target.done or lost:
                del flights[target]
                end = now if flight.end is None else min(flight.end, now)
                if flight.background and end > flight.start:
                    told, kind = _detail(target, lost), _kind(target.op)
                    self._timeline.add(Interval(f"worker:{rank}", kind, flight.start, end, told, background=True))

    def _emit(self, rank: int, awaited: _Awaited, lost: str) -> None:
        role, kind, target, now = f"worker:{rank}", awaited.kind, awaited.target, self._engine.now
        flight = self._flights[rank].get(target) if target is not None else None
        if target is None or flight is None:
            self._add(role, kind, awaited.start, now)
            return
        told = _detail(target, lost)
        if not isinstance(target.op, Call | Mean | Meet):
            begun_before = kind == "gradient" and flight.background  # then all of it is in the background
            self._add(role, kind, awaited.start, now, "awaited" if begun_before else told)
            return
        arrives = min(max(flight.arrives, awaited.start), now)
        performed = now if flight.performed is None else min(max(flight.performed, arrives), now)
        if performed == arrives:
            self._add(role, kind, awaited.start, now, told)
            return
        by = f"worker:{flight.by}" if flight.by is not None and flight.by != rank else ""
        self._add(role, kind, awaited.start, arrives, told)
        self._add(role, "wait", arrives, performed, told or kind, by)
        self._add(role, kind, performed, now, told)

    def _add(self, role: str, kind: str, start: float, end: float, detail: str = "", by: str = "") -> None:
        if end > start:
            self._timeline.add(Interval(role, kind, start, end, detail, by))

    def _interrupt(self, rank: int, kind: str) -> None:
        """A worker has died, or has lost its step."""
        self._close(rank, "lost")
        self._awaited[rank] = _Awaited(kind, self._engine.now)

    def finish(self) -> None:
        """The run has ended: close what is under way."""
        for rank in range(self._engine.workers):
            self._close(rank, "unfinished")
        self._timeline.finish(self._engine.now)


def _replace(owner: Any, name: str, note: Callable[..., None]) -> None:
    """Have a method of one object call `note` with its arguments first."""
    method = getattr(owner, name)

    def traced(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return method(*args, **kwargs)

    setattr(owner, name, traced)


def _kind(op: Op[Any]) -> str:
    match op:
        case Grad():
            return "gradient"
        case Call():
            return "call"
        case Mean():
            return "mean"
        case Meet():
            return "meeting"
        case _:
            return "sleep"


def _detail(target: Pending[Any], lost: str) -> str:
    if isinstance(target.op, Grad):
        if target.done:
            return "stopped" if target.result is None else ""
        return lost
    return target.op.method.name if isinstance(target.op, Call) else ""
