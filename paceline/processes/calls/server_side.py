"""The server's call scheduler in shared memory: arguments are read, and results written, in the workers' mailboxes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.errors import RunError
from paceline.ops import Call, mapped, tensors
from paceline.processes.calls.mailbox import Mailbox, put
from paceline.processes.memory.board import FAILED, STOP, fence
from paceline.processes.memory.byte_ranges import of_tensors
from paceline.processes.memory.call_codec import encode
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.transport import CallPort
from paceline.runs.order_log import REFUSED, ROSE, SELDOM, OrderLogWriter, RecordKind, probe_of
from paceline.runtime.call_scheduler import CallScheduler

CALL, PROBED = RecordKind.CALL, RecordKind.PROBED  # bound here: looking up a member of an enum is slow


class SharedCallScheduler(CallScheduler):
    """Writes results to mailboxes, and marks on the board when the server is inside a call."""

    def __init__(self, memory: RunMemory, shard: int, before_answer: Callable[[], None], port: CallPort | None) -> None:
        state = memory.shard_state(shard)
        super().__init__(memory.scheme, state, memory.plan.workers, memory.ledger(f"ledger.{shard}."))
        self._memory, self._shard = memory, shard
        self._mark, self._performed = memory.board.mark, memory.board.performed
        self._answered = memory.board.answered[shard]
        self._to_wake: set[int] = set()
        self._length = memory.layout.notes["length"]
        self._low, self._high = memory.bounds(shard)
        self._cut = memory.plan.servers > 1
        self._lead = shard == 0 and self._cut
        self._before_answer = before_answer  # a worker that sees the last update must see the stop too
        self._port = port
        self.journal: OrderLogWriter | None = None
        self._probe = probe_of(state.x)
        self._refused, self._version = self.ledger.cells.cell("refused").numpy(), state.cell("v").numpy()
        self._then = self._version.item(), self._refused.item()  # after the last call
        self._until_probe = SELDOM
        self.member_event = 0  # the last MemberEvent
        self._present = memory.tensor("ledger.0.present").numpy()
        self._numbers = {name: number for number, name in enumerate(sorted(memory.scheme.methods))}

    def order(self, entry: int) -> None:
        """Write the next entry of the order of calls; only the lead server does, and the others follow it."""
        board, memory = self._memory.board, self._memory
        number = board.get("ordered")
        followers = range(1, memory.plan.servers)
        while number - min(board.performed[shard] for shard in followers) >= len(board.ring):
            if board.run[STOP] == FAILED:
                raise RunError("the run has failed")
            memory.wakeup.look()
            time.sleep(0)
        at = number % len(board.ring)
        board.ring[at], board.ring_numbers[at] = entry, board.posted[entry] if entry >= 0 else 0
        board.put("ordered", number + 1)
        if self._port is not None:
            self._port.order(number)
        for shard in followers:
            memory.wakeup.ring(board.server_place(shard))

    def _perform(self, rank: int, call: Call[Any], ticket: Any) -> Any:
        mailbox: Mailbox = ticket
        if self._lead:
            self.order(mailbox.index)
        self.settle_answers()
        self._mark[self._shard] += 1
        result = None if mailbox.tell else self._noted(rank, call, ticket)
        if mailbox.tell and self.journal is not None:
            self.journal.add(RecordKind.TELL, self._numbers[call.method.name], rank)
            self.journal.flush()
        self._before_answer()
        self.done(mailbox)
        return result

    def _noted(self, rank: int, call: Call[Any], ticket: Any) -> Any:
        """Perform a call and record it, both inside the mark: a server that dies between the two is torn."""
        result, journal = super()._perform(rank, call, ticket), self.journal
        if journal is None:
            return result
        now = self._version.item(), self._refused.item()
        flags = (ROSE if now[0] != self._then[0] else 0) | (REFUSED if now[1] != self._then[1] else 0)
        self._then = now
        self._until_probe -= 1
        if self._until_probe:
            journal.record(CALL, self._numbers[call.method.name], rank, flags)
        else:
            self._until_probe = SELDOM
            journal.record(PROBED, self._numbers[call.method.name], rank, flags, self._probe())
        return result

    def done(self, mailbox: Mailbox) -> None:
        """A call is performed: write the count, then the answer, then the end of the mark."""
        board = self._memory.board
        self._performed[self._shard] += 1
        self._answered[mailbox.index] = mailbox.taken  # not `posted`: the mailbox may hold the next call by now
        self._mark[self._shard] += 1
        fence()
        if self._port is not None and self._port.far(mailbox.rank):
            self._port.answer(mailbox)
        elif board.awaited[mailbox.rank] == mailbox.index + 1:
            self._to_wake.add(mailbox.rank)

    def settle_answers(self) -> None:
        """The state is about to change: copy the replies that are still to be sent from it."""
        if self._port is not None and self._port.owed:
            self._port.settle()

    def wake(self) -> None:
        """Wake the workers that have replies. Called when nothing is left to do: they may need this core."""
        for rank in self._to_wake:
            self._memory.wakeup.ring(rank)
        self._to_wake.clear()

    def _member(self, event: Literal["left", "joined"], rank: int, quorum: bool) -> None:
        self.settle_answers()
        self._mark[self._shard] += 1
        if self._shard == 0:  # inside the mark: a death between the two would leave a wrong quorum
            self._memory.board.known[rank] = self._present[rank] = int(event == "joined")
        super()._member(event, rank, quorum)
        self._then = self._version.item(), self._refused.item()
        if self.journal is not None:
            self.journal.add(RecordKind.MEMBER, self.member_event, rank)
            self.journal.flush()
        self._performed[self._shard] += 1
        self._mark[self._shard] += 1

    def _check_crossing(self, call: Call[Any], values: Any) -> None:
        """Arguments have crossed already; encoding refuses results that cannot."""

    def _handed_over(self, result: Any, call: Call[Any], ticket: Any) -> Any:
        mailbox: Mailbox = ticket
        room, low, high, length = mailbox.area("reply"), self._low, self._high, self._length
        segment = self._memory.segment
        far = self._port is not None and self._port.far(mailbox.rank)
        owed = self._port.owed if self._port is not None and far else None
        mailbox.pieces, mailbox.data = pieces, _ = [], None

        def place(tensor: Tensor) -> int:
            size = tensor.numel() * tensor.element_size()
            at = room(size)
            if owed is None or not owed.note(mailbox, tensor, at):
                segment.tensor(at, tensor.dtype, tensor.shape).copy_(tensor)
            pieces.append((at, size))
            return at

        if not self._cut:
            mailbox.told = encode((result,), place)
            put(mailbox.reply, mailbox.told)
            return None

        def place_part(tensor: Tensor) -> int:
            # a shard of a vector goes to its range of the whole vector; other tensors are the same on all servers
            if not (tensor.dim() and tensor.is_floating_point() and tensor.shape[-1] == high - low):
                return place(tensor) if self._lead else room(tensor.numel() * tensor.element_size())
            whole = (*tensor.shape[:-1], length)
            count = tensor[..., 0].numel() * length
            at = room(count * tensor.element_size())
            part = segment.tensor(at, tensor.dtype, whole)[..., low:high]
            own = at + low * tensor.element_size()
            if owed is None or tensor.dim() > 1 or not owed.note(mailbox, tensor, own):
                part.copy_(tensor)
            if far:
                pieces.extend(of_tensors(segment, [part]))
            return at

        mailbox.told = words = encode((_widened(result, high - low, length),), _parts_in_order(result, place_part))
        if self._lead or not self._memory.near(0):
            put(mailbox.reply, words)
        return None


def _parts_in_order(result: Any, place: Callable[[Tensor], int]) -> Callable[[Tensor], int]:
    """Encoding sees tensors of the full shape, without memory; the shards are placed, in the same order."""
    parts = iter(tensors(result))
    return lambda _: place(next(parts))


def _widened(value: Any, part: int, length: int) -> Any:
    def whole(tensor: Tensor) -> Tensor:
        if tensor.dim() and tensor.is_floating_point() and tensor.shape[-1] == part:
            return torch.empty((*tensor.shape[:-1], length), dtype=tensor.dtype, device="meta")
        return tensor

    return mapped(whole, value)
