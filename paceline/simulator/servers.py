"""The servers of a simulation: each performs calls on its range of the vector, in the order of the lead server."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from paceline.ops import Call, Pending, mapped
from paceline.runtime.call_scheduler import CallScheduler, Reply
from paceline.runtime.staleness import StalenessLedger
from paceline.sampling import mixed
from paceline.scheme import Scheme
from paceline.simulator.faults import Fault
from paceline.simulator.simulated_worker import SimulatedWorker
from paceline.state import State

if TYPE_CHECKING:
    from paceline.simulator.engine import SimulationEngine

Kind = Literal["call", "left", "joined", "save"]


@dataclass(frozen=True)
class Kept:
    """The servers' part of a checkpoint, and the counts at the moment at which the lead saved its own."""

    cells: dict[str, Tensor]
    ledger: dict[str, Tensor]
    scheme: Scheme  # with the values that hooks have set
    known: list[bool]  # the workers that are counted
    used: int
    dropped: int
    gradients: int
    samples: int


class _Torn(Exception):
    """A server has died inside a call."""

    def __init__(self, shard: int, fault: Fault) -> None:
        self.shard, self.fault = shard, fault


@dataclass(slots=True, eq=False)
class _Entry:
    """An entry of the lead's order, which the other servers follow."""

    kind: Kind
    rank: int
    call: Call[Any] | None = None
    ticket: Any = None
    results: list[Any] = field(default_factory=list)  # of each server
    done: Callable[[Kept], None] | None = None


class _Watched(CallScheduler):
    """A call scheduler that counts its calls: other servers follow its order, and it may die inside a call."""

    def __init__(self, servers: Servers, shard: int, state: State, ledger: StalenessLedger) -> None:
        super().__init__(servers.engine.scheme, state, servers.engine.workers, ledger)
        self._servers, self._shard = servers, shard

    def _perform(self, rank: int, call: Call[Any], ticket: Any) -> Any:
        self._servers.enter(self._shard)
        refused = self.ledger.cells.refused
        result = super()._perform(rank, call, ticket)
        if self._shard == 0:
            sent, told = ticket
            self._servers.note(_Entry("call", rank, sent, told, [result]))
            if not call.method.reads:
                engine = self._servers.engine
                engine.accounts.carried(engine.seats[rank], refused=self.ledger.cells.refused > refused)
        return result

    def _member(self, event: Literal["left", "joined"], rank: int, quorum: bool) -> None:
        self._servers.enter(self._shard)
        super()._member(event, rank, quorum)
        if self._shard == 0:
            self._servers.note(_Entry(event, rank))


class Servers:
    """One call scheduler, or one for each range of the vector. The first server leads: only it evaluates guards."""

    def __init__(self, engine: SimulationEngine, state: State, number: int, faults: Sequence[Fault]) -> None:
        self.engine, self.state = engine, state
        self._watched = engine.watched
        direct = not all(method.atomic for method in engine.scheme.methods.values())
        self.number = number  # of processes; if workers change the vector themselves, the servers only save it
        length, shards = len(state.x), 1 if direct else number
        edges = [length * k // shards for k in range(shards + 1)]
        self._ranges = list(pairwise(edges))
        self.followers = range(1, shards)  # of the lead
        self._length = length
        self._inside: list[list[Fault]] = [[] for _ in range(number)]
        for fault in sorted(faults, key=lambda fault: fault.when):
            if fault.unit == "call":
                self._inside[fault.rank].append(fault)
        self._calls = [0] * number
        self.dead = [False] * number
        self.frozen_until = [-math.inf] * number
        self.cut_until = [-math.inf] * number  # from the lead
        self._states = [state] if shards == 1 else [self._shard(k) for k in range(shards)]
        holders = [engine.scheme.holder(rank) for rank in range(engine.workers)]
        self._ledgers = [StalenessLedger.fresh(engine.workers, holders) for _ in self._states]
        self.known = [True] * engine.workers
        self.open()

    def _shard(self, shard: int) -> State:
        """A range of every vector, in place; the lead has the numbers themselves, the others have copies."""
        low, high = self._ranges[shard]
        vectors = self.state.vectors(self.engine.scheme.uncut)
        cells = {}
        for name in self.state:
            cell = self.state.cell(name)
            cells[name] = cell[..., low:high] if name in vectors else cell if shard == 0 else cell.clone()
        return State.over(cells, low)

    def open(self) -> None:
        """Start from the present states; calls that waited or were under way are void."""
        engine = self.engine
        pairs = enumerate(zip(self._states, self._ledgers, strict=True))
        self._schedulers: list[CallScheduler] = (
            [_Watched(self, shard, state, ledger) for shard, (state, ledger) in pairs]
            if self._watched
            else [CallScheduler(engine.scheme, self.state, engine.workers, self._ledgers[0])]
        )
        self.scheduler = self._schedulers[0]
        self._order: list[_Entry] = []
        self._performed = [0] * len(self._schedulers)
        self._mail: list[Callable[[], list[Reply]]] = []  # for the lead, while it is dead or stopped
        self._arrived: list[set[Call[Any]]] = [set() for _ in self._schedulers]
        self._joining: list[int] = []  # restarted workers whose death some server has not seen yet

    def forget(self) -> list[int]:
        """The run will return to a checkpoint. Gives the restarted workers that had not joined yet."""
        joining = self._joining
        self.open()
        return joining

    @property
    def up(self) -> bool:
        """Whether every server is alive and not stopped."""
        return not any(self._still(shard) for shard in range(self.number))

    def _still(self, shard: int) -> bool:
        return self.dead[shard] or self.engine.now < self.frozen_until[shard]

    def submit(self, rank: int, call: Call[Any], ticket: Any) -> list[Reply]:
        """A call has arrived at the lead. A run without faults uses the scheduler's own `submit`."""

        def take() -> list[Reply]:
            if self.engine.seats[rank].generation == ticket[0]:
                self.scheduler.submit(rank, self._cut(call, 0), (call, ticket))
            return self._follow()

        return self._taken(take)

    def arrived(self, _: SimulatedWorker, shard: int, call: Call[Any]) -> None:
        """A call has arrived at another server than the lead."""
        self._arrived[shard].add(call)
        self.engine.deliver_answers(self._guarded(self._follow))
        self.let_join()

    def left(self, rank: int) -> list[Reply]:
        for shard in self.followers:  # a call of the order that will never arrive
            behind = self._order[self._performed[shard] :]
            if any(entry.rank == rank and entry.call and entry.call not in self._arrived[shard] for entry in behind):
                self.engine.recovery.tear(shard)
                return []
        return self._changed(rank, present=False)

    def joined(self, rank: int) -> list[Reply]:
        return self._changed(rank, present=True)

    def _changed(self, rank: int, *, present: bool) -> list[Reply]:
        def take() -> list[Reply]:
            self.known[rank] = present
            change = self.scheduler.joined if present else self.scheduler.left
            answers = change(rank, quorum=self.engine.shrink)
            return self._follow() if self._watched else answers

        return self._taken(take)

    def missed(self, rank: int) -> bool:
        """Whether all servers have seen that a worker died; if not, it is restarted as soon as they have."""
        if not self.known[rank] and self.up and not self.behind:
            return True
        self._joining.append(rank)
        return False

    def save(self, done: Callable[[Kept], None]) -> list[Reply]:
        """Let every server save its part at this place of the order; `done` is called when all have."""

        def take() -> list[Reply]:
            self.enter(0)
            self.note(_Entry("save", 0, results=[self.kept()], done=done))
            return self._follow()

        return self._taken(take)

    def kill(self, shard: int) -> None:
        self.dead[shard] = True
        self.frozen_until[shard] = -math.inf  # the process that replaces it is not stopped

    def moved(self) -> None:
        """A server has been restarted or continued: perform the calls that have arrived in the meantime."""
        engine = self.engine
        engine.deliver_answers(self._guarded(self._follow))
        while self._mail and not self._still(0) and not engine.over:
            engine.deliver_answers(self._guarded(self._mail.pop(0)))
        engine.recovery.try_return()
        self.let_join()

    def let_join(self) -> None:
        """Restart the workers whose death all servers have seen by now."""
        if self._joining and not self.engine.recovery.returning and self.up and not self.behind and not self._mail:
            waiting, self._joining = self._joining, []
            for rank in waiting:
                self.engine.injector.restart(rank)

    def enter(self, shard: int) -> None:
        """A server begins a call; a fault may kill it inside."""
        self._calls[shard] += 1
        if self._inside[shard] and self._calls[shard] >= self._inside[shard][0].when:
            raise _Torn(shard, self._inside[shard].pop(0))

    def note(self, entry: _Entry) -> None:
        self._order.append(entry)
        self._performed[0] += 1

    def _taken(self, take: Callable[[], list[Reply]]) -> list[Reply]:
        if self._still(0) or self.engine.over:  # after the last update no call is taken
            self._mail.append(take)
            return []
        return self._guarded(take)

    def _guarded(self, take: Callable[[], list[Reply]]) -> list[Reply]:
        try:
            return take()
        except _Torn as torn:
            self.engine.recovery.tear(torn.shard, torn.fault.duration)
            return []

    @property
    def behind(self) -> bool:
        """Whether some server has not performed everything that the lead has."""
        return any(performed < self._performed[0] for performed in self._performed)

    def _follow(self) -> list[Reply]:
        """Let the other servers follow the lead; gives the replies of calls that all have performed."""
        for shard in self.followers:
            while self._performed[shard] < self._performed[0] and self._perform_next(shard):
                pass
        complete = min(self._performed)
        done, self._order = self._order[:complete], self._order[complete:]
        self._performed = [performed - complete for performed in self._performed]
        answers: list[Reply] = []
        for entry in done:
            if entry.kind == "call":
                alone = len(self._ranges) == 1
                whole = entry.results[0] if alone else _assembled(entry.results, self._ranges[0][1])
                answers.append(Reply(entry.rank, entry.ticket, whole))
            if entry.done is not None:
                kept, *parts = entry.results
                for (low, high), part in zip(self._ranges[1:], parts, strict=True):
                    for name, cell in part.items():
                        kept.cells[name][..., low:high] = cell
                entry.done(kept)
        return answers

    def _perform_next(self, shard: int) -> bool:
        entry, scheduler = self._order[self._performed[shard]], self._schedulers[shard]
        if self._still(shard) or self.engine.now < self.cut_until[shard]:
            return False
        if entry.call is not None:
            if entry.call not in self._arrived[shard]:
                return False
            self._arrived[shard].discard(entry.call)
            entry.results.append(scheduler.perform(entry.rank, self._cut(entry.call, shard), None).result)
        elif entry.kind == "save":
            self.enter(shard)
            state, vectors = self._states[shard], self.state.vectors(self.engine.scheme.uncut)
            entry.results.append({name: state.cell(name).clone() for name in vectors})
        else:
            scheduler._member(entry.kind, entry.rank, self.engine.shrink)  # type: ignore[arg-type]
        self._performed[shard] += 1
        return True

    def _cut(self, call: Call[Any], shard: int) -> Call[Any]:
        if len(self._schedulers) == 1:
            return call
        low, high = self._ranges[shard]

        def part(arg: Tensor) -> Tensor:
            return arg[..., low:high] if _is_vector(arg, self._length) else arg

        return Call(call.method, mapped(part, call.args))

    def begin_parts(self, seat: SimulatedWorker, op: Call[Any], target: Pending[Any]) -> None:
        """Schedule a call that is not atomic: pieces of the vector in turn, interleaved with those of other workers."""
        engine, rank, length = self.engine, seat.worker.rank, self._length
        pieces = max(1, min(getattr(engine.scheme, "chunks", 1), length))
        edges = [length * k // pieces for k in range(pieces + 1)]
        results: list[Any] = []
        times = engine.cost.pass_over(rank, pieces, mixed(engine.seed, "access", rank, seat.awaits))
        for low, high, seconds in zip(edges, edges[1:], times, strict=False):
            engine.later(seat, seconds, self.on_part, op, target, (low, high, length), results)

    def on_part(
        self, seat: SimulatedWorker, op: Call[Any], target: Pending[Any], part: tuple[int, int, int], results: list[Any]
    ) -> None:
        engine, (_, high, length) = self.engine, part
        result, answers = self.scheduler.perform_part(seat.worker.rank, op, part)
        results.append(result)
        engine.deliver_answers(answers)
        if high == length:
            if engine.watched:
                engine.accounts.carried(seat)
            engine.deliver(seat, target, _assembled(results, length // len(results)))

    def kept(self) -> Kept:
        """The present state of the servers."""
        engine, accounts = self.engine, self.engine.accounts
        return Kept(
            self.state.saved(),
            self._ledgers[0].saved(),
            self.scheduler.scheme,
            list(self.known),
            accounts.used,
            accounts.dropped,
            engine.gradients,
            engine.samples,
        )

    def restore(self, kept: Kept) -> None:
        """Restore a checkpoint; calls under way are void."""
        self.put(kept.cells, kept.ledger)
        self.known = list(kept.known)
        self.open()
        self.set(kept.scheme)

    def put(self, cells: Mapping[str, Tensor], ledger: Mapping[str, Tensor]) -> None:
        """Give every server its part of these cells."""
        self.state.restore(cells)
        vectors = self.state.vectors(self.engine.scheme.uncut)
        for shard, state in enumerate(self._states):
            self._ledgers[shard].restore(ledger)
            for name in (name for name in state if shard and name not in vectors):
                setattr(state, name, cells[name])

    def spoil(self, shard: int) -> None:
        """Overwrite the range of a server that died inside a call: it may be half changed."""
        low, high = self._ranges[min(shard, len(self._ranges) - 1)]
        self.state.x[low:high] = math.nan

    def set(self, scheme: Scheme) -> None:
        """Replace the scheme by one with the values that a hook has set."""
        for scheduler in self._schedulers:
            scheduler.scheme = scheme


def _assembled(results: Sequence[Any], width: int) -> Any:
    """One result from those of several ranges, the first of this width: vectors are joined, all else is the first's."""
    first = results[0]
    if isinstance(first, tuple):
        return tuple(_assembled(items, width) for items in zip(*results, strict=True))
    return torch.cat(list(results), dim=-1) if _is_vector(first, width) else first


def _is_vector(value: Any, length: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.is_floating_point() and value.shape[-1] == length
