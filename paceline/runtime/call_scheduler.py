"""The server's call scheduler: one call at a time, each when its guard allows, in the order of arrival."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from paceline.ops import Call
from paceline.runtime.call_performer import CallPerformer
from paceline.runtime.staleness import StalenessLedger
from paceline.scheme import Scheme, ServerMethod
from paceline.state import Reading, State


class Reply(NamedTuple):
    """The result of a call; `ticket` is the value that `submit` got with the call."""

    rank: int
    ticket: Any
    result: Any


@dataclass(slots=True, eq=False)
class _Waiting:
    number: int
    rank: int
    ticket: Any
    call: Call[Any]
    gone: bool = False


@dataclass(slots=True, eq=False)
class _Line:
    """Calls that wait for the same guard with the same arguments: one evaluation serves them all."""

    key: Any
    method: ServerMethod[Any, Any]
    args: tuple[Any, ...]
    calls: deque[_Waiting] = field(default_factory=deque)
    open: bool = False
    read: dict[str, int] = field(default_factory=dict)


class CallScheduler(CallPerformer):
    """Performs calls on the server's state, in the simulator and in processes.

    A guard is evaluated again only when a cell that it read has changed, and once for all calls that wait with equal
    arguments. So a call costs the same however many workers wait.
    """

    def __init__(self, scheme: Scheme, state: State, workers: int, ledger: StalenessLedger | None = None) -> None:
        super().__init__(scheme, state, workers, ledger)
        self._lines: dict[Any, _Line] = {}
        self._watchers: dict[str, dict[Any, _Line]] = {}  # cell -> lines whose guard read it
        self._seen: dict[str, int] = {}  # cell -> its write count when they were last asked
        self._ready: list[tuple[int, Any]] = []  # heap of (arrival number, line key)
        self._by_rank: dict[int, list[_Waiting]] = {}
        self._number = 0

    def submit(self, rank: int, call: Call[Any], ticket: Any = None) -> list[Reply]:
        """Take a call; gives the replies of all calls that were performed because of it, in order."""
        self._check_crossing(call, call.args)
        if call.method.when is None:
            return [Reply(rank, ticket, self._perform(rank, call, ticket)), *self._settle()]
        waiting = _Waiting(self._number, rank, ticket, call)
        self._number += 1
        line = self._line(call)
        line.calls.append(waiting)
        if len(line.calls) == 1:
            self._offer(line)
        self._by_rank.setdefault(rank, []).append(waiting)
        return list(self._settle())

    def perform(self, rank: int, call: Call[Any], ticket: Any = None) -> Reply:
        """Perform a call without evaluating its guard: this server follows the order of another one."""
        return Reply(rank, ticket, self._perform(rank, call, ticket))

    def left(self, rank: int, *, quorum: bool = True) -> list[Reply]:
        """A worker has left: its waiting calls are void, and the scheme may lower its quorum."""
        for waiting in self._by_rank.pop(rank, ()):
            waiting.gone = True
        self._member("left", rank, quorum)
        return list(self._settle())

    def joined(self, rank: int, *, quorum: bool = True) -> list[Reply]:
        """A worker has joined again."""
        self._member("joined", rank, quorum)
        return list(self._settle())

    def waits(self, rank: int) -> Call[Any] | None:
        """The call of a worker that waits for its guard, or None."""
        waiting = self._by_rank.get(rank)
        return waiting[-1].call if waiting else None

    def explain(self, call: Call[Any]) -> str:
        """Why a call waits: its guard, and the cells that the guard reads."""
        return explain(self.scheme, self.state, call)

    def perform_part(self, rank: int, call: Call[Any], part: tuple[int, int, int]) -> tuple[Any, list[Reply]]:
        """Perform one piece of a call that is not atomic: (low, high, length of x). Gives the result of the piece, and
        the replies of waiting calls that were performed because of it."""
        low, high, length = part
        self.ledger.caller = self.scheme.holder(rank)
        state = self.state.part(low, high, last=high == length, uncut=self.scheme.uncut)
        args = tuple(a[..., low:high] if _is_vector(a, length) else a for a in call.args)
        result = call.method.function(self.scheme.rates_at(state), state, *args)
        self.calls += high == length
        if low == 0 and self._gives_x(result):
            self.ledger.pulled(self.ledger.caller, self.state.v)
        return self._by_value(result, call), list(self._settle())

    def _line(self, call: Call[Any]) -> _Line:
        # a call with tensors has a line of its own: comparing them would cost more than the guard
        key: Any = id(call) if any(isinstance(a, Tensor) for a in call.args) else (call.method.name, call.args)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line(key, call.method, call.args)
            self._ask(line)
        return line

    def _ask(self, line: _Line) -> None:
        """Evaluate a guard and remember the cells that it read: only their change can change the answer."""
        assert line.method.when is not None
        for name in line.read:
            self._watchers[name].pop(line.key, None)
        reading = Reading(self.state)
        line.open = bool(line.method.when(self.scheme, reading, *line.args))
        line.read = reading.cells()
        for name, count in line.read.items():
            if not self._watchers.setdefault(name, {}):
                self._seen[name] = count
            self._watchers[name][line.key] = line

    def _refresh(self) -> None:
        for name, watchers in list(self._watchers.items()):  # a guard may read further cells this time
            if watchers and self._seen[name] != self.state.changes(name):
                self._seen[name] = self.state.changes(name)
                for line in list(watchers.values()):
                    self._ask(line)
                    self._offer(line)

    def _offer(self, line: _Line) -> None:
        """Put the first call of a line among those that may be performed, or delete an empty line."""
        while line.calls and line.calls[0].gone:
            line.calls.popleft()
        if not line.calls:
            self._lines.pop(line.key, None)
            for name in line.read:
                self._watchers[name].pop(line.key, None)
        elif line.open:
            heapq.heappush(self._ready, (line.calls[0].number, line.key))

    def _settle(self) -> Iterator[Reply]:
        """Perform waiting calls, earliest first, until no guard allows another."""
        while True:
            self._refresh()
            if not self._ready:
                return
            number, key = heapq.heappop(self._ready)
            line = self._lines.get(key)
            if line is None or not line.open or not line.calls or line.calls[0].number != number:
                continue  # its guard has become false since, or it was offered twice
            waiting = line.calls.popleft()
            if not waiting.gone:
                self._by_rank[waiting.rank].remove(waiting)
                result = self._perform(waiting.rank, waiting.call, waiting.ticket)
                yield Reply(waiting.rank, waiting.ticket, result)
            self._refresh()
            self._offer(line)

    def _perform(self, rank: int, call: Call[Any], ticket: Any) -> Any:
        return self._handed_over(self.carry_out(rank, call), call, ticket)

    def _handed_over(self, result: Any, call: Call[Any], ticket: Any) -> Any:
        """The result as the caller gets it: a copy, made before the next call."""
        return self._by_value(result, call)


def explain(scheme: Scheme, state: State, call: Call[Any]) -> str:
    """Why a call waits, as far as the state tells."""
    if call.method.when is None:
        return f"{call}"
    reading = Reading(state)
    call.method.when(scheme, reading, *call.args)
    cells = ", ".join(f"{name} = {getattr(state, name)}" for name in reading.cells())
    return f"{call}: guard '{call.method.guard_text()}' is false with {cells or 'no cell read'}"


def _is_vector(value: object, length: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[-1] == length
