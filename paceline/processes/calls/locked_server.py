"""The server on one node: the process that calls it performs the call, on the shared state and under its lock.

A call begins and ends with the board's mark: it is odd inside. If a process dies there, the state may be half changed:
nobody performs anything on it until the supervisor has sent the run back to a checkpoint. A call whose guard is false
waits in its worker's mailbox. Each process that changes a cell which a waiting guard has read evaluates that guard, and
performs the call if it is true now: the order of arrival holds, and only the workers that it concerns are woken.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.ops import Call
from paceline.processes.calls.client import RolledBack, Stopped
from paceline.processes.calls.late_copies import LateCopies
from paceline.processes.calls.late_reads import LateReads
from paceline.processes.calls.mailbox import SAVE, SET, Mailbox, put, received
from paceline.processes.memory import snapshot
from paceline.processes.memory.board import (
    FAILED,
    GENERATION,
    GOAL,
    INSIDE,
    MAILBOXES,
    RUNNING,
    SETTINGS,
    STOP,
    STOPPING,
    fence,
)
from paceline.processes.memory.call_codec import encode
from paceline.processes.memory.packed_words import generation_of, only_asks_when
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.memory.spinning import Spinning
from paceline.processes.transport import WaitFor
from paceline.runs import order_log
from paceline.runs.checkpoint import Checkpoint
from paceline.runs.order_log import REFUSED, ROSE, SELDOM, MemberEvent, RecordKind, probe_of
from paceline.runs.shared_order_log import SharedOrderLog
from paceline.runtime.call_performer import CallPerformer
from paceline.scheme import Scheme
from paceline.state import Reading

CALL, PROBED = RecordKind.CALL, RecordKind.PROBED  # bound here: looking up a member of an enum is slow
Cells = list[tuple[int, str]]  # bits and names
SLICE = 0.01  # seconds of one wait in the lock's queue, between looks at the run
CELLS = 62  # bits for the cells that a guard has read; further cells share them
NONE = 1 << CELLS  # the guard has read no cell


class LockedServer:
    """One process's hold on the server. `acquire` first; between it and `release` the state is this process's."""

    def __init__(self, memory: RunMemory, place: int, wait_for: WaitFor) -> None:
        self._memory, self._board, self._place, self._wait_for = memory, memory.board, place, wait_for
        self._run, self._generation = memory.board.run, 0
        self._on_gpu = memory.on_gpu
        self._lock = memory.board.lock()
        self.contended = False  # another process had the lock when this one last wanted it
        self._settings = memory.board.get("settings")
        state = memory.shard_state(0)
        self.copies = LateCopies(memory.board, place, self._check)
        self.reads = LateReads(memory.board, place, self._check)
        self.performer = CallPerformer(self._scheme(), state, memory.plan.workers, memory.ledger("ledger.0."))
        self.state = state
        self._mark, self._performed, self._watched = memory.board.mark, memory.board.performed, memory.board.watched
        self._none_watched = bytes(self._watched.nbytes)
        self._posted, self._answered = memory.board.posted, memory.board.answered[0]
        self._mailboxes = [
            Mailbox(memory, rank, number) for rank in range(memory.plan.workers) for number in range(MAILBOXES)
        ]
        self.methods = [memory.scheme.methods[name] for name in sorted(memory.scheme.methods)]
        self._numbers = {method.name: number for number, method in enumerate(self.methods)}
        self._bits = {name: 1 << number % CELLS for number, name in enumerate(state)}
        self._several = {name for name in state if state.cell(name).dim() > 1}
        self._named: dict[int, tuple[Cells, bool]] = {}  # by mask: what `_cells_watched` gives
        self._refused = self.performer.ledger.cells.cell("refused").numpy()
        self._present = memory.tensor("ledger.0.present").numpy()
        self._to_wake: set[int] = set()
        self.log: SharedOrderLog | None = None
        if memory.recorded():
            folder = order_log.place(Path(memory.plan.directory), memory.plan.launch)
            self.log = SharedOrderLog(memory.board.server_log, folder)
        self._probe = probe_of(state.x)
        self._spinning = Spinning(memory.wakeup.spinning.limit)
        if not self._on_gpu:  # last: a process that starts does not wait for the rows of others
            several = [name for name in state if state.cell(name).dim() > 1]
            rows = dict.fromkeys(several, lambda: self.copies.before_use(self._generation))
            state.watch(rows | {"x": lambda: self.reads.before_use(self._generation)}, self.copies.write)

    # the lock

    def acquire(self, generation: int, *, torn: bool = False) -> None:
        """Wait for the lock. Stopped or RolledBack if the run has failed, or has returned to a checkpoint since this
        `generation`. `torn`: take it even if a process has died inside a call."""
        self.contended = not self._lock.try_acquire()
        if self.contended:
            self.outwait(generation)
        run = self._run
        if run[STOP] == FAILED or run[GENERATION] != generation or (self._mark[0] & 1 and not torn):
            self._lock.release()
            self._memory.wakeup.wait(lambda: self._given_up(generation))
            self._check(generation)
        self._generation = generation
        if run[SETTINGS] != self._settings:
            self._settings = run[SETTINGS]
            self.performer.scheme = self._scheme()
        if self.log is not None:
            self.log.begin(generation)

    def release(self) -> None:
        """Let the others have the lock, wake those whose calls were answered, and copy what this call left to copy."""
        if self._on_gpu:
            self._memory.synchronize()
        self._lock.release()
        if self._to_wake:
            for rank in self._to_wake:
                self._memory.wakeup.ring(rank)
            self._to_wake.clear()
        self.copies.perform()
        self.reads.perform()

    def _check(self, generation: int) -> None:
        """Stopped or RolledBack if the run has failed, or has returned to a checkpoint since a generation."""
        if self._given_up(generation):
            raise RolledBack if self._run[GENERATION] != generation else Stopped

    def _given_up(self, generation: int) -> bool:
        run = self._board.run
        return bool(run[STOP] == FAILED or run[GENERATION] != generation)

    def outwait(self, generation: int) -> None:
        """Wait for the lock: for the time of a few calls by spinning, where there are cores for it, then in its
        queue. Where that takes unusually long, the wait is like any other: it ends with the run, or by patience."""
        lock, wakeup = self._lock, self._memory.wakeup
        spinning, clock = self._spinning, time.perf_counter_ns
        began = now = clock()
        until = began + spinning.nanoseconds
        while now < until:
            os.sched_yield()
            taken, now = lock.looks_free() and lock.try_acquire(), clock()
            if taken:
                spinning.waited(now - began, now)
                return
        until = now + int(self._memory.plan.patience / 4 * 1e9)
        while now < until and not self._given_up(generation):
            taken, now = lock.acquire_within(SLICE), clock()
            if taken:
                spinning.waited(now - began, now)
                return
        held = False

        def acquired() -> bool:
            nonlocal held
            held = held or lock.acquire_within(SLICE)
            return held

        before, wakeup.restless = wakeup.restless, lambda: True  # nobody rings for it
        try:
            self._wait_for(acquired, "the server")
        except BaseException:
            if held:
                lock.release()
            raise
        finally:
            wakeup.restless = before

    # under the lock

    def perform(self, rank: int, call: Call[Any], hand_over: Callable[[Any, Call[Any]], Any]) -> Any:
        """Perform a call, and the waiting calls that it allows. `hand_over` gives the result that the caller keeps."""
        copies = self.copies
        if self._watched.tobytes() == self._none_watched:
            self._begin()
            copies.begin(call.args)
            result = self._carry_out(rank, call)
            copies.end()
            self._end()
            return result if result is None else hand_over(result, call)
        cells, numbers = self._cells_watched()
        before = self._counts(cells)
        self._begin()
        if numbers:  # else a guard is evaluated below that may have read a row
            copies.begin(call.args)
        result = self._carry_out(rank, call)
        copies.end()
        if result is not None:
            result = hand_over(result, call)
        self._settle(cells, before)  # inside the mark: no death can leave a guard that nobody evaluates
        self._end()
        return result

    def reached(self) -> bool:
        """Whether the last update of the run is made."""
        return bool(0 <= self._run[GOAL] <= self.state.v)

    def unmet(self, call: Call[Any]) -> int:
        """0 if the guard of a call is true, else the cells that it has read, as bits."""
        assert call.method.when is not None
        reading = Reading(self.state)
        met = call.method.when(self.performer.scheme, reading, *call.args)
        mask = 0
        for name in reading.cells():
            mask |= self._bits[name]
        return 0 if met else mask or NONE

    def line_up(self, mailbox: Mailbox, unmet: int) -> None:
        """Have the call in a mailbox performed by the process that makes its guard true."""
        arrivals = self._board.get("arrivals") + 1
        self._board.put("arrivals", arrivals)
        self._board.arrived[mailbox.index] = arrivals
        self._watched[mailbox.index] = unmet

    def special(self, kind: int, rank: int, args: tuple[Any, ...]) -> None:
        """Perform a WorkerRequest."""
        self.copies.before_use(self._generation)
        self._begin()
        if kind == SAVE:
            snapshot.keep_shard(self._memory, 0)
        elif kind == SET:
            hyper = dict(zip(args[::2], args[1::2], strict=True))
            self._memory.save_overrides(self._memory.overrides | hyper)
            self._settings_changed()
        if self.log is not None and kind == SAVE:
            self.log.add(RecordKind.SAVE, rank)
        elif self.log is not None:
            self.log.text(RecordKind.SET, hyper)
        self._performed[0] += 1
        self._end()

    def member(self, rank: int, event: MemberEvent, *, quorum: bool) -> None:
        """A worker joined or left."""
        joined, board = event == MemberEvent.JOINED, self._board
        cells, _ = self._cells_watched()
        before = self._counts(cells)
        self._begin()
        board.known[rank] = self._present[rank] = int(joined)
        if not joined:  # what it had posted is void
            for index in range(board.mailbox(rank, 0), board.mailbox(rank + 1, 0)):
                self._answered[index], self._watched[index] = self._posted[index], 0
        self.performer._member("joined" if joined else "left", rank, quorum)
        if self.log is not None:
            self.log.add(RecordKind.MEMBER, event, rank)
        self._performed[0] += 1
        self._settle(cells, before)
        self._end()
        self._to_wake.add(rank)

    def leave_out(self, rank: int, *, present: bool) -> None:
        """A worker joined or left while the run ends: the scheme is not told."""
        self._board.known[rank] = int(present)
        self._to_wake.add(rank)

    def stop_at_goal(self) -> None:
        """Stop the run once its last update is made."""
        if self.reached() and self._run[STOP] == RUNNING:
            self._memory.stop(STOPPING)

    def return_to(self, saved: Checkpoint, generation: int) -> None:
        """Set the state back to a checkpoint."""
        memory, board = self._memory, self._board
        self.copies.before_use(generation)  # other processes may still copy rows of calls that are void
        self.reads.before_use(generation)
        self._begin()
        snapshot.restore_shard(memory, 0, saved)
        for index, posted in enumerate(self._posted):
            self._watched[index] = 0
            if generation_of(posted) < generation:
                self._answered[index] = posted
        self._performed[0] = 0
        for rank, present in enumerate(saved.numbers["present"]):
            board.known[rank] = present
        memory.save_overrides(saved.numbers["overrides"])
        self._settings_changed()
        if self.log is not None:
            self.log.repair()
            self.log.text(RecordKind.NOTE, {"return": generation})
        self._end()
        board.server_generation[0] = generation

    def close(self) -> None:
        """The run is over: nobody performs calls any more."""
        if self.log is not None:
            self.log.close()

    def _begin(self) -> None:
        self._run[INSIDE] = self._place + 1  # first: from the mark on, the death of this process tears the state
        self._mark[0] |= 1  # it is odd already if a process has died inside a call

    def _end(self) -> None:
        if self._on_gpu:
            self._memory.synchronize()
        self._mark[0] += 1
        fence()

    def _carry_out(self, rank: int, call: Call[Any]) -> Any:
        """Perform and record a call, inside the mark."""
        refused = self._refused.item() if self.log is not None else 0
        result, version, rise = self.performer.change(rank, call)
        self._performed[0] = performed = self._performed[0] + 1
        if self.log is not None:
            flags = (ROSE if rise else 0) | (REFUSED if self._refused.item() != refused else 0)
            number = self._numbers[call.method.name]
            if performed % SELDOM:
                self.log.add(CALL, number, rank, flags)
            else:
                self.log.add(PROBED, number, rank, flags, self._probe())
        if 0 <= self._run[GOAL] <= version:
            self.stop_at_goal()  # a worker that sees the last update must see the stop too
        return result

    def _cells_watched(self) -> tuple[Cells, bool]:
        """The cells that waiting guards have read, each with its bit, and whether none of them has several rows."""
        mask = 0
        for one in set(self._watched.tolist()):
            mask |= one
        found = self._named.get(mask)
        if found is None:
            cells = [(bit, name) for name, bit in self._bits.items() if bit & mask]
            found = self._named[mask] = cells, not any(name in self._several for _, name in cells)
        return found

    def _counts(self, cells: Cells) -> list[int]:
        """How often each of some cells has been written."""
        return [self.state.changes(name) for _, name in cells]

    def _changed(self, cells: Cells, before: list[int]) -> int:
        """Those of some cells that have been written since, as bits."""
        mask = 0
        for (bit, name), then in zip(cells, before, strict=True):
            if self.state.changes(name) != then:
                mask |= bit
        return mask

    def _settle(self, cells: Cells, before: list[int]) -> None:
        """Perform waiting calls, earliest first, until no guard allows another. `before`: how often the watched cells
        had been written."""
        arrived, allowed = self._board.arrived, dict[int, Call[Any]]()
        changed = self._changed(cells, before)
        while self._run[STOP] == RUNNING:
            if changed:
                known: dict[bytes, int] = {}  # guards with equal arguments are evaluated once
                for index, mask in enumerate(self._watched.tolist()):
                    if mask & changed:
                        self._ask(index, known, allowed)
            if not allowed:
                return
            index = min(allowed, key=arrived.__getitem__)
            call, mailbox = allowed.pop(index), self._mailboxes[index]
            cells, _ = self._cells_watched()
            before = self._counts(cells)
            self._reply(mailbox, self._carry_out(mailbox.rank, call))
            changed = self._changed(cells, before)
            self._answer(index, mailbox)

    def _answer(self, index: int, mailbox: Mailbox) -> None:
        self._answered[index] = mailbox.taken
        self._watched[index] = 0
        self._to_wake.add(mailbox.rank)

    def _ask(self, index: int, known: dict[bytes, int], allowed: dict[int, Call[Any]]) -> None:
        """Evaluate the guard of a waiting call. A worker that waits to read is told at once: it looks again itself."""
        mailbox = self._mailboxes[index]
        if self._posted[index] == self._answered[index]:
            self._watched[index] = 0
            return
        if not self._board.alive[mailbox.rank]:
            return  # the server will void it
        request, call = mailbox.request, None
        key = request[: 1 + request[0]].tobytes() + request[-1:].tobytes()
        if key in known and only_asks_when(request[-1]):  # as of a worker before: nothing of it is needed
            mailbox.taken, mailbox.tell = self._posted[index], True
        else:
            call = received(self._memory, mailbox, self.methods, self._memory.bounds(0))
            if key not in known:
                known[key] = self.unmet(call)
        if known[key]:
            self._watched[index] = known[key]
            allowed.pop(index, None)
        elif mailbox.tell:
            self._answer(index, mailbox)
        else:
            assert call is not None
            allowed[index] = call

    def _reply(self, mailbox: Mailbox, result: Any) -> None:
        """Write the result of a call that has waited to its mailbox."""
        room = mailbox.area("reply")

        def place(tensor: Tensor) -> int:
            return mailbox.copy_in(tensor, room)

        put(mailbox.reply, encode((result,), place))

    def _settings_changed(self) -> None:
        self._board.put("settings", self._board.get("settings") + 1)

    def _scheme(self) -> Scheme:
        """The scheme as the server has it: hooks of workers change theirs earlier."""
        return self._memory.scheme_with(self._memory.overrides)
