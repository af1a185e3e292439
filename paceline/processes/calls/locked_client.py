"""A worker's calls on one node: it performs them itself, under the server's lock."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.ops import Call, mapped
from paceline.processes.calls.client import CallClient, RolledBack, Stopped, gives
from paceline.processes.calls.locked_server import LockedServer
from paceline.processes.calls.mailbox import Mailbox, put
from paceline.processes.memory.board import GENERATION, RUNNING, STOP
from paceline.processes.memory.call_codec import encode
from paceline.processes.memory.packed_words import asks_when, call_number, looks_for
from paceline.processes.memory.run_memory import HEAD_WORDS, RunMemory
from paceline.processes.transport import WaitFor
from paceline.runs.order_log import RecordKind
from paceline.runtime.call_performer import check_unchanged, versions
from paceline.scheme import ServerMethod

AHEAD_BYTES = 4 << 20  # of x: of a larger one, a copy under the lock would keep others waiting for too long
RECENT = 500_000  # ns
LOOKS = 1000  # for a moment at which no process writes: about the time of a few calls
POST = RecordKind.POST  # bound here: looking up a member of an enum is slow


@dataclass(slots=True)
class ReadAhead:
    """What a worker has read right after a call, for its next one."""

    method: ServerMethod[Any, Any]
    result: Any
    version: int | None  # of x, if the result has it
    position: int  # calls that the server had performed
    at: int = 0  # when, ns


class LockedClient(CallClient):
    """Performs one worker's calls. A call that has to wait for its guard is in a mailbox meanwhile."""

    def __init__(self, memory: RunMemory, rank: int, wait_for: WaitFor) -> None:
        super().__init__(memory, rank, wait_for)
        self.server = LockedServer(memory, rank, wait_for)
        self._home = self._state.x.device
        if not memory.on_gpu:
            rows = [name for name in self._state if self._state.cell(name).dim() > 1]
            self._state.watch(dict.fromkeys(rows, lambda: self.server.copies.before_use(self.generation)))
        # tries, then under the lock. Waiting workers are told of a new state from inside a call: they all read it when
        # the call is over, and not one after the other under the lock
        self._tries = 2, LOOKS
        self._results: dict[int, Any] = {}  # of calls that were started and performed at once, by mailbox
        small = self._home.type == "cpu" and self._state.x.nbytes <= AHEAD_BYTES
        self._reads_ahead = small and not memory.plan.exact
        self._last: ServerMethod[Any, Any] | None = None  # the last call, if it was not a read
        self._followers: dict[str, ServerMethod[Any, Any] | None] = {}  # by method: the read that came next last time
        self._ahead: ReadAhead | None = None
        self._waited = False  # for the lock, at the last call

    def call(self, call: Call[Any]) -> Any:
        """Have a call performed and give its result."""
        method = call.method
        if not method.atomic:
            return self._here(method, call.args)
        if method.reads:
            if self._last is not None:
                unguarded = method.when is None and not call.args
                self._followers[self._last.name], self._last = method if unguarded else None, None
            ahead, self._ahead = self._ahead, None
            if ahead is not None and ahead.method is method and self._recent(ahead):
                self._has_read(method, ahead.position, ahead.version)
                return ahead.result
            return self._read(method, call.args, call.into)
        if self._last is not None:
            self._followers[self._last.name] = None
        self._last, self._ahead = method, None
        mailbox, result = self._attempt(call)
        return result if mailbox is None else self.collect(mailbox)

    def post(self, call: Call[Any], *, ahead: bool = False) -> Mailbox:
        """Begin a call: it is performed now, unless its guard is false."""
        mailbox = self._vacant(self._methods[call.method.name])
        self._free.append(mailbox)  # the one that comes next
        waiting, result = self._attempt(call)
        if waiting is not None:
            return waiting
        self._free.pop()
        self._results[mailbox.index] = result
        return mailbox

    def collect(self, mailbox: Mailbox) -> Any:
        """Wait for a call's result."""
        if mailbox.index not in self._results:
            return super().collect(mailbox)
        self._free.append(mailbox)
        return self._results.pop(mailbox.index)

    def ready(self, mailbox: Mailbox) -> bool:
        return mailbox.index in self._results or super().ready(mailbox)

    def returned(self, place: int) -> bool:
        return True  # calls have read their arguments when they are over

    def special(self, kind: int, *args: Any) -> None:
        """Perform a WorkerRequest."""
        self.server.acquire(self.generation)
        try:
            self.server.special(kind, self.rank, args)
        finally:
            self.server.release()

    def ask(self, kind: int, *args: Any) -> Mailbox:
        """Perform a WorkerRequest. Where it could not be, because the run has failed or returned to a checkpoint, the
        mailbox never becomes ready."""
        mailbox = self._vacant(kind)
        try:
            self.special(kind, *args)
            self._results[mailbox.index] = None
        except (RolledBack, Stopped):
            self._post(mailbox)
        return mailbox

    def forget(self) -> None:
        """Calls under way are void."""
        self._results.clear()
        self._last = self._ahead = None
        super().forget()

    def _attempt(self, call: Call[Any]) -> tuple[Mailbox | None, Any]:
        """Perform a call and give its result; or the mailbox where it waits for its guard, or for the run's end."""
        method, server = call.method, self.server
        if not (self.device.type == self._home.type == "cpu"):
            call = Call(method, tuple(mapped(self._brought, arg) for arg in call.args))
        server.performer._check_crossing(call, call.args)
        given = versions(call)
        if self.journal is not None:  # first: a call must not be visible before its log records are
            self.journal.record(POST, self._methods[method.name])
        follower = self._followers.get(method.name) if self._reads_ahead else None
        # memory for what will be read ahead is found before the lock is taken, if others had the lock the last time
        room = self._recycled.room_for(self._state.x) if follower is not None and self._waited else None
        self._enter()
        try:
            if self._board.run[STOP] != RUNNING:
                if method.silent and server.reached():
                    return None, None  # as if it had come too late
                if not method.silent:
                    mailbox = self._vacant(0)
                    self._post(mailbox)
                    return mailbox, None
            if method.when is not None and (unmet := server.unmet(call)):
                return self._line_up(self._methods[method.name], call, unmet), None
            result = server.perform(self.rank, call, self._own)
            self._waited = server.contended
            if follower is not None and self._waited:
                self._read_ahead(follower, room)
        finally:
            server.release()
        check_unchanged(call, given)
        if result is not None:
            server.performer._check_crossing(call, result)
        if self._ahead is not None:
            self._ahead.at = time.perf_counter_ns()
        return None, result

    def _read_ahead(self, method: ServerMethod[Any, Any], room: Tensor | None) -> None:
        """Perform, under the lock, the read that is expected next. Others wait for the lock: later one of them would
        write while this worker reads. Now the state is still in its core's cache. x is copied to `room` once the lock
        is released."""
        state, late = self._state, list[tuple[Tensor, Tensor]]()
        result = method.function(self.memory.scheme.rates_at(state), state)

        def copied(tensor: Tensor) -> Tensor:
            if tensor is not state.x:
                return self._copied(tensor)
            target = self._recycled.room_for(tensor) if room is None else room
            late.append((tensor, target))
            return target

        own = mapped(copied, result)
        self.server.reads.begin(late)
        version = state.v if gives(result, self._x) else None
        self._ahead = ReadAhead(method, own, version, self._board.performed[0])

    def _recent(self, ahead: ReadAhead) -> bool:
        """Whether the worker may take what was read ahead for the state now: it has done next to nothing since."""
        current = self._board.run[GENERATION] == self.generation
        return bool(current and time.perf_counter_ns() - ahead.at < RECENT)

    def _read(self, method: ServerMethod[Any, Any], args: tuple[Any, ...], into: tuple[Tensor | None, ...]) -> Any:
        """Perform a method that only reads: without the lock, if no process writes meanwhile."""
        server = self.server
        while True:
            seen, result = self._look(method, args, into)
            if seen:
                return result
            if method.when is not None:
                self._wait_to_read(method, args)
                continue
            self._enter()
            try:
                seen, result = self._look(method, args, into)
            finally:
                server.release()
            if seen:
                return result

    def _wait_to_read(self, method: ServerMethod[Any, Any], args: tuple[Any, ...]) -> None:
        """Wait until the guard of a method that only reads may be true. While this worker spins it evaluates the guard
        itself, after every change of the state. Before it sleeps it lines up: then the process that makes the guard
        true wakes it."""
        board, server, state, scheme = self._board, self.server, self._state, self.memory.scheme
        guard, mark, seen = method.when, board.mark, -1
        mailbox: Mailbox | None = None
        met = False
        assert guard is not None

        def may_read() -> bool:
            nonlocal met, seen
            if mailbox is not None:
                return self.ready(mailbox)
            now = mark[0]
            if not met and now != seen and not now & 1:
                seen, met = now, bool(guard(scheme, state, *args))
            return met

        def line_up() -> None:
            nonlocal mailbox, met
            self._enter()
            try:
                call: Call[Any] = Call(method, args)
                if unmet := server.unmet(call):
                    mailbox = self._line_up(asks_when(self._methods[method.name]), call, unmet)
                    board.awaited[self.rank] = mailbox.index + 1
                else:
                    met = True
            finally:
                server.release()

        wakeup = self.memory.wakeup
        board.awaited[self.rank] = looks_for(self._methods[method.name])
        wakeup.before_sleep = line_up
        try:
            self._wait_for(may_read, "the server")
        finally:
            wakeup.before_sleep = None
        if mailbox is not None:
            self._free.append(mailbox)

    def _enter(self) -> None:
        """Take the lock, as a worker that the server's state counts among the present ones."""
        board, rank = self._board, self.rank
        while True:
            self.server.acquire(self.generation)
            if board.known[rank] or board.run[STOP] != RUNNING:
                return
            self.server.release()
            self._wait_for(lambda: bool(board.known[rank]), "the server")

    def _line_up(self, kind: int, call: Call[Any], unmet: int) -> Mailbox:
        mailbox = self._vacant(kind)
        room = mailbox.area("args")
        words = encode(call.args, lambda tensor: mailbox.copy_in(tensor, room))
        mailbox.request[HEAD_WORDS - 1] = kind
        put(mailbox.request, words)
        self._post(mailbox)
        self.server.line_up(mailbox, unmet)
        return mailbox

    def _post(self, mailbox: Mailbox) -> None:
        self._count += 1
        self._board.posted[mailbox.index] = call_number(self.generation, self._count)

    def _brought(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.device == self._home else tensor.to(self._home)

    def _own(self, result: Any, call: Call[Any]) -> Any:
        """A result as the worker keeps it: without tensors of the server, or of an argument."""

        def own(tensor: Tensor) -> Tensor:
            return self._copied(tensor) if self.server.performer.shared(tensor, call) else tensor.to(self.device)

        return mapped(own, result)
