"""The server's role: performs the workers' calls, one at a time, until every worker has left."""

from __future__ import annotations

import os
import signal
from typing import Any

from torch import Tensor

from paceline.config import build
from paceline.ops import Call
from paceline.processes.calls.mailbox import COUNT, SAVE, SET, SHOW, Mailbox, put, received
from paceline.processes.calls.server_side import SharedCallScheduler
from paceline.processes.memory import snapshot
from paceline.processes.memory.board import (
    DONE,
    FAILED,
    GENERATION,
    MAILBOXES,
    RUNNING,
    STARTING,
    STOP,
    STOPPING,
    TRAINING,
    WAITING,
)
from paceline.processes.memory.byte_ranges import of_tensors
from paceline.processes.memory.call_codec import encode
from paceline.processes.memory.packed_words import generation_of, member_entry, member_of, method_of
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.roles import profiling, recorder
from paceline.processes.roles.stopwatch import Category
from paceline.processes.transport import CallOrder
from paceline.runs.order_log import MemberEvent, OrderLogWriter, RecordKind


class Server:
    """One shard of the state. The first server leads: it alone evaluates guards and fixes the order of the calls."""

    def __init__(self, memory: RunMemory, shard: int) -> None:
        self.memory, self.shard, self.board = memory, shard, memory.board
        self._lead = shard == 0
        self._profile = profiling.of_server(memory, shard)
        self.journal: OrderLogWriter | None = None
        if self._lead:
            self.journal, _ = recorder.journal_of(memory, "server", generation=memory.board.get("generation"))
            self._profile.journal(self.journal)
        self._several = memory.plan.servers > 1
        self._shrink = memory.plan.quorum == "shrink"
        self._mailboxes = [
            Mailbox(memory, rank, number) for rank in range(memory.plan.workers) for number in range(MAILBOXES)
        ]
        self._methods = self._profile.methods(memory.scheme.methods[name] for name in sorted(memory.scheme.methods))
        self._profile.part(self, _special=Category.CHECKPOINT, _take=Category.COPY)
        self._posted, self._answered = memory.board.posted, memory.board.answered[shard]
        self._alive, self._known = memory.board.alive, memory.board.known
        self._bounds = memory.bounds(shard)
        self._goal = memory.board.get("goal")
        self._exact = memory.plan.exact
        self._port = memory.transport.port(memory, shard, self._mailboxes)
        self._following: CallOrder | None = None
        self._follow_lead()
        self._enter(memory.board.get("generation"))

    def _follow_lead(self) -> None:
        """Find out whether the first server is on another node: then the order of the calls comes over a connection."""
        board, memory = self.board, self.memory
        memory.wakeup.wait(lambda: bool(board.server_node[0] >= 0 or board.run[STOP]))
        apart = not self._lead and not memory.near(0)
        if apart and self._following is None:
            self._following = memory.transport.order(memory, self.shard)
        elif not apart and self._following is not None:
            self._following.close()
            self._following = None

    def _enter(self, generation: int) -> None:
        self._generation = generation
        self.scheduler = SharedCallScheduler(self.memory, self.shard, self._stop_at_goal, self._port)
        self._profile.part(self.scheduler, _handed_over=Category.COPY)
        self._taken = [0] * len(self._posted)  # numbers of the calls that the call scheduler has
        self._found: list[int] = []  # mailboxes of calls that came while this server waited
        self.scheduler.journal = self.journal

    def run(self) -> None:
        board, wakeup = self.board, self.memory.wakeup
        self._profile.start()
        if board.server_generation[self.shard] != self._generation:
            self._return()
        self._stop_at_goal()  # the process before may have died between the last update and the stop
        while True:
            board.server_state[self.shard] = TRAINING
            if board.run[GENERATION] != self._generation:
                self._return()
            moved = self._lead_on() if self._lead else self._follow()
            self.scheduler.wake()
            wakeup.look()
            if moved:
                continue
            if all(board.gone) or board.get("over"):
                break
            board.server_state[self.shard] = WAITING
            wakeup.wait(self._wanted)
        self._profile.stop()
        if self._port is not None:
            self._port.close()
        if self._following is not None:
            self._following.close()
        board.server_state[self.shard] = DONE
        if self.journal is not None:
            self.journal.close()

    def _wanted(self) -> bool:
        """Whether there is anything to do."""
        board = self.board
        if board.run[GENERATION] != self._generation or all(board.gone):
            return True
        if not self._lead:
            return self._next() is not None
        if self._alive.tobytes() != self._known.tobytes():
            return True
        self._found = [index for index in self._new() if self._due(index)]
        return bool(self._found)

    def _new(self) -> list[int]:
        """Mailboxes with a call that has not been taken. Comparing bytes is the fastest way to find none."""
        if self._posted.tobytes() == self._answered.tobytes():
            return []
        # Words are read one after the other: a worker may send two calls meanwhile, and the second may be read without
        # the first. So calls later than those of a first reading are left for the next look.
        seen = self._posted.tolist()
        last = [max(seen[first : first + MAILBOXES]) for first in range(0, len(seen), MAILBOXES)]
        rows = zip(self._posted.tolist(), self._answered.tolist(), self._taken, strict=True)
        new = [
            (self._mailboxes[index].request[-1] < 0, posted, index)
            for index, (posted, answered, taken) in enumerate(rows)
            if posted != answered and posted != taken and posted <= last[index // MAILBOXES]
        ]
        # each worker's calls in the order in which it sent them, and SAVE after all other calls
        return [index for *_, index in sorted(new)]

    def _due(self, index: int) -> bool:
        """Whether a call is of this generation and may be performed: after the stop, only what the end needs."""
        mailbox = self._mailboxes[index]
        if generation_of(self._posted[index]) != self._generation or not self._alive[mailbox.rank]:
            return False
        number = mailbox.request[-1]
        return self.board.run[STOP] == RUNNING or number < 0 or self._owed(number)

    def _owed(self, number: int) -> bool:
        """Whether a call is performed after the stop: the worker did not wait for it, so its cells are ahead of it."""
        reached = 0 <= self._goal <= self.scheduler.state.v
        return self.board.run[STOP] != FAILED and self._methods[method_of(number)].silent and not reached

    def _lead_on(self) -> bool:
        moved = False
        found, self._found = self._found, []
        if self._alive.tobytes() != self._known.tobytes():
            moved, found = True, []
            for rank in [rank for rank, one in enumerate(self._alive) if one != self._known[rank]]:
                present = bool(self._alive[rank])
                if not present:
                    self._last_calls(rank)
                if self.board.run[STOP] != RUNNING:  # the end of the run is no reason to lower a quorum
                    self._known[rank] = int(present)
                    continue
                gone = MemberEvent.PARTED if self.board.parted[rank] else MemberEvent.LEFT
                kind = MemberEvent.JOINED if present else gone
                if self._several:
                    self.scheduler.order(member_entry(rank, kind))
                self._member(rank, kind)
        for index in found or self._new():
            if self._due(index):
                moved = True
                self._take(index)
        return moved

    def _last_calls(self, rank: int) -> None:
        """Calls that a worker had posted before it died, and did not wait for, are performed."""
        for index in self._new():
            mailbox = self._mailboxes[index]
            number = mailbox.request[-1]
            current = generation_of(self._posted[index]) == self._generation
            if mailbox.rank == rank and current and number >= 0 and self._owed(number):
                self._take(index)

    def _take(self, index: int) -> None:
        mailbox = self._mailboxes[index]
        self._taken[index] = self._posted[index]
        request = received(self.memory, mailbox, self._methods, self._bounds)
        if isinstance(request, Call):
            self.scheduler.submit(mailbox.rank, request, mailbox)
        else:
            if self._several:
                self.scheduler.order(index)
            self._special(mailbox, *request)

    def _stop_at_goal(self) -> None:
        if self._exact:  # the chief may have set an earlier goal; after a return updates are made again
            self._goal = self.board.get("goal")
            if self.board.run[GENERATION] != self._generation:
                return
        if self._lead and 0 <= self._goal <= self.scheduler.state.v and self.board.run[STOP] == RUNNING:
            self.memory.stop(STOPPING)

    def _special(self, mailbox: Mailbox, kind: int, args: tuple[Any, ...]) -> None:
        """Perform a WorkerRequest."""
        memory, segment, part = self.memory, self.memory.segment, list[Tensor]()
        hyper: dict[str, Any] = dict(zip(args[::2], args[1::2], strict=True)) if kind == SET else {}
        self.scheduler.settle_answers()
        self.board.mark[self.shard] += 1
        if kind == SAVE:
            snapshot.keep_shard(memory, self.shard)
            part = snapshot.shard_part(memory, self.shard, snapshot.KEEP)
        elif kind == SHOW:
            part = snapshot.shard_part(memory, self.shard)
        elif kind == COUNT:
            part = snapshot.shard_counts(memory, self.shard)
        elif self._lead:
            memory.save_overrides(memory.overrides | hyper)
            part = [memory.tensor("overrides")]
        if kind == SET:
            memory.scheme = self.scheduler.scheme = build.scheme_of(memory.scheme, hyper)
        mailbox.told, mailbox.pieces, mailbox.data = encode((None,), lambda _: 0), of_tensors(segment, part), None
        if kind in (SHOW, COUNT):  # copied: the state may change before it is sent
            content = memoryview(segment.memory)
            mailbox.data = [memoryview(bytes(content[at : at + size])) for at, size in mailbox.pieces]
        if self.journal is not None:
            if kind != SET:  # either way a worker sees the state as it is now
                self.journal.add(RecordKind.SAVE, mailbox.rank)
            else:
                self.journal.text(RecordKind.SET, hyper)
            self.journal.flush()
        if self._lead:
            put(mailbox.reply, mailbox.told)
        self.scheduler.done(mailbox)

    def _member(self, rank: int, kind: MemberEvent) -> None:
        """A worker joined or left. After PARTED no barrier waits for it, whatever the quorum."""
        self.scheduler.member_event = kind
        if kind == MemberEvent.JOINED:
            self.scheduler.joined(rank, quorum=self._shrink)
        else:
            for number in range(MAILBOXES):  # what a dead worker had posted is void
                index = self.board.mailbox(rank, number)
                self._answered[index] = self._posted[index]
            self.scheduler.left(rank, quorum=self._shrink or kind == MemberEvent.PARTED)
        self.memory.wakeup.ring(rank)  # a successor may wait until its predecessor is known to be gone

    def _follow(self) -> bool:
        """Perform calls in the order that the lead has fixed."""
        board, moved = self.board, False
        while (entry := self._next()) is not None:
            moved = True
            if entry < 0:
                self._member(*member_of(entry))
                continue
            mailbox = self._mailboxes[entry]
            request = received(self.memory, mailbox, self._methods, self._bounds)
            if isinstance(request, Call):
                self.scheduler.perform(mailbox.rank, request, mailbox)
            else:
                self._special(mailbox, *request)
            if board.run[GENERATION] != self._generation:
                break
        return moved

    def _next(self) -> int | None:
        """The next entry of the lead's order, if its call is here: one from another node may still be on its way."""
        board = self.board
        ordered = board.get("ordered") if self._following is None else self._following.ordered
        performed = board.performed[self.shard]
        if performed >= ordered:
            return None
        at = performed % len(board.ring)
        entry: int = board.ring[at]
        if entry >= 0 and self._posted[entry] != board.ring_numbers[at]:
            mailbox = self._mailboxes[entry]
            current = generation_of(board.ring_numbers[at]) == board.run[GENERATION] == self._generation
            if not self._alive[mailbox.rank] and current:
                tear(self.memory, self.shard, f"worker:{mailbox.rank} is gone; a call of it reached only some servers")
            return None
        return entry

    def _return(self) -> None:
        """Return to the checkpoint that the supervisor names: another server died inside a call."""
        board = self.board
        board.server_state[self.shard] = STARTING
        generation = board.get("generation")
        saved = snapshot.find(self.memory, board.get("restore"))

        def lead_is_back() -> bool:
            failed = board.run[STOP] == FAILED
            return bool(board.server_generation[0] == generation or failed or board.run[GENERATION] != generation)

        if not self._lead:  # the lead empties the order first
            self.memory.wakeup.wait(lead_is_back)
            if board.run[GENERATION] != generation:
                return  # another process has died meanwhile: the caller's loop returns once more
        self.scheduler.settle_answers()
        snapshot.restore_shard(self.memory, self.shard, saved)
        for index, posted in enumerate(self._posted):
            if generation_of(posted) < generation:  # void; calls of this generation are still to be performed
                self._answered[index] = posted
        board.performed[self.shard] = 0
        self._follow_lead()  # the lead may be on another node now
        if self._following is not None:
            self._following.go_back(generation)
        board.mark[self.shard] += board.mark[self.shard] % 2
        if self._lead:
            board.put("ordered", 0)
            for rank, present in enumerate(saved.numbers["present"]):
                board.known[rank] = present
            self.memory.save_overrides(saved.numbers["overrides"])
            self.memory.scheme = self.memory.scheme_with(saved.numbers["overrides"])
        if self.journal is not None:
            self.journal.note({"return": generation})
        self._enter(generation)  # not the board's: another process may have died meanwhile
        board.server_generation[self.shard] = generation
        self.memory.wakeup.ring_all()


def tear(memory: RunMemory, shard: int, why: str) -> None:
    """This server cannot perform the next call of the order: die as if inside a call, so that the whole run returns to
    the last checkpoint."""
    print(f"server:{shard}: {why}", flush=True)
    memory.board.mark[shard] += 1 - memory.board.mark[shard] % 2
    os.kill(os.getpid(), signal.SIGKILL)
