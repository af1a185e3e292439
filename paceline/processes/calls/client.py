"""A worker's calls to the servers. Servers of its own node read its mailbox in shared memory; to servers of other nodes
the transport sends it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.errors import SchemeError
from paceline.ops import Call, mapped, tensors
from paceline.processes.calls.mailbox import COUNT, SHOW, Mailbox, got, put
from paceline.processes.calls.zero_copy import SMALLEST, BufferPool, ReceiveBuffer, over
from paceline.processes.memory.board import FAILED, GENERATION, MAILBOXES, STOP, fence
from paceline.processes.memory.byte_ranges import Span, size_of
from paceline.processes.memory.call_codec import decode, encode
from paceline.processes.memory.packed_words import asks_when, call_number, count_of, method_of, only_asks_when
from paceline.processes.memory.payload_codec import to_bytes
from paceline.processes.memory.run_memory import HEAD_WORDS, RunMemory
from paceline.processes.transport import RemoteCalls
from paceline.runs.order_log import OrderLogWriter, RecordKind
from paceline.scheme import ServerMethod
from paceline.state import State

ASK, POST, READ = RecordKind.ASK, RecordKind.POST, RecordKind.READ  # bound here: looking up a member of an enum is slow
READS = 16  # tries to read while no server writes, or looks for such a moment, before the server is asked


class Stopped(Exception):
    """The run ends: the wait is over."""


class RolledBack(Exception):
    """The run has returned to a checkpoint: calls and means under way are void."""


class CallClient:
    """Sends one worker's calls to the servers, and waits for their results."""

    def __init__(self, memory: RunMemory, rank: int, wait_for: Callable[[Callable[[], bool], str], None]) -> None:
        self.memory, self.rank = memory, rank
        self._board = board = memory.board
        self._wait_for = wait_for
        self._mailboxes = [Mailbox(memory, rank, number) for number in range(MAILBOXES)]
        self._free = list(reversed(self._mailboxes))
        self._void: list[Mailbox] = []  # forgotten, but a server may still be reading them
        self._methods = {name: number for number, name in enumerate(sorted(memory.scheme.methods))}
        self._servers = range(memory.plan.servers)
        self.generation = board.get("generation")  # the run's, when this worker last returned to a checkpoint
        self.device = torch.device("cpu")  # of the worker's own tensors
        self._recycled = BufferPool()
        self._gave: dict[int, Span] = {}  # by method: the last result's place in the mailbox, if one large tensor
        self._answered = [board.answered[shard] for shard in self._servers]
        self._silent: list[tuple[Mailbox, str, list[tuple[Tensor, int]]]] = []
        self.journal: OrderLogWriter | None = None
        self._unheard, self._tries = False, (READS, READS)
        self._grads = {memory.layout.places[f"grad.{rank}.{k}"].offset for k in range(2)}
        self._reach: RemoteCalls | None = memory.transport.calls(memory, rank, self._mailboxes, self._given_up)
        self._near = [shard for shard in self._servers if memory.near(shard)]
        latest = count_of(self._reach.latest) if self._reach is not None else 0
        self._count = max(latest, *(count_of(board.posted[mailbox.index]) for mailbox in self._mailboxes))
        self._state = memory.server_state()
        self._x, self._home = self._state.x.data_ptr(), self._state.x.device
        self._held = memory.tensor("ledger.0.held").numpy()
        self._in_place = memory.worker_state(rank).x is self._state.x  # this worker computes at the shared vector
        self._fitting: tuple[Tensor | None, Tensor | None] = None, None  # a result, and the cell that it was copied to
        if memory.direct():
            self._tally = memory.ledger(f"tally.{rank}.")
            cells = {name: self._state.cell(name) for name in self._state}
            v = torch.zeros((), dtype=torch.int64)
            self._open, self._open_v = State.over(cells | {"v": v}), v.numpy().reshape(-1).data
            self._open.keep_ledger(self._tally)

    @property
    def remote(self) -> RemoteCalls | None:
        """The way to servers of other nodes, where the transport has one."""
        return self._reach

    def call(self, call: Call[Any]) -> Any:
        """Have a call performed and give its result."""
        method = call.method
        here = not self._reach
        if not method.atomic and here:
            return self._here(method, call.args)
        if method.silent:
            self._go_on(call)
            return None
        if method.reads and method.when is None and here:
            self._settle()
            seen, result = self._look(method, call.args, call.into)
            if seen:
                return result
        if method.reads and method.when is not None and here:
            while True:  # the guard may be false again before this worker has read
                self._awaited(self._send(asks_when(self._methods[method.name]), call.args))
                seen, result = self._look(method, call.args, call.into)
                if seen:
                    return result
        return self.collect(self.post(call))

    def post(self, call: Call[Any], *, ahead: bool = False) -> Mailbox:
        """Send a call without waiting for it. `ahead`: the worker will not wait for the reply at once."""
        mailbox = self._send(self._methods[call.method.name], self._crossing(call))
        if ahead and self._reach:
            self._reach.ahead.add(mailbox.index)
        return mailbox

    def _crossing(self, call: Call[Any]) -> tuple[Any, ...]:
        """The arguments of a call; to servers of other nodes, payloads in place of compressed vectors."""
        if call.packed is None or not self._reach:
            return call.args
        payloads, length = call.packed.payloads, self.memory.layout.notes["length"]
        return tuple(
            (to_bytes(payloads[place], length),) if place in payloads else arg for place, arg in enumerate(call.args)
        )

    def _given_up(self) -> bool:
        return bool(self._board.run[STOP] == FAILED or self._board.run[GENERATION] != self.generation)

    def go_back(self, generation: int) -> None:
        """The run resumes from a checkpoint, which the servers have returned to already."""
        self.generation = generation
        if self._reach is not None:
            self._reach.meet()
            self._reach.void()
            self._near = [shard for shard in self._servers if self.memory.near(shard)]

    def _go_on(self, call: Call[Any]) -> None:
        """Send a call that has no result, without waiting: servers perform a worker's calls in order, so its next call
        comes after this one. Gradients are not copied, other tensors are. The server is woken when this worker waits or
        computes: often another call follows at once."""
        segment = self.memory.segment
        held = [a for a in call.args if isinstance(a, Tensor) and segment.offset(a) in self._grads]
        mailbox = self._send(self._methods[call.method.name], self._crossing(call), silent=True)
        self._silent.append((mailbox, call.method.name, [(a, a._version) for a in held]))
        self._unheard = True

    def flush(self) -> None:
        """Wake the servers for calls that were sent without waiting."""
        if self._unheard:
            self._ring()

    def carry_on(self) -> None:
        """This worker is about to compute: calls under way continue meanwhile."""
        self.flush()
        if self._reach:
            self._reach.carry_on()

    def _ring(self) -> None:
        self._unheard = False
        for shard in self._near:
            self.memory.wakeup.ring(self._board.server_place(shard))

    def _settle(self) -> None:
        """Wait until every call that was sent without waiting is performed."""
        if self._silent:
            self.flush()
            last = self._silent[-1][0]
            self._board.awaited[self.rank] = last.index + 1
            self._wait_for(lambda: self.ready(last), "the server")
            self._settled()

    def _settled(self) -> None:
        sent, self._silent = self._silent, []
        for mailbox, name, held in sent:
            self._free.append(mailbox)
            for gradient, version in held:
                if gradient._version != version:
                    raise SchemeError(
                        f"worker:{self.rank} changed a gradient in place after {name}() had been given it; "
                        "arguments cross by value: change a copy"
                    )

    def returned(self, place: int) -> bool:
        """Whether no call under way still reads the gradient at an offset."""
        if self._silent and self.ready(self._silent[-1][0]):
            self._settled()
        offset = self.memory.segment.offset
        return not any(offset(gradient) == place for _, _, held in self._silent for gradient, _ in held)

    def special(self, kind: int, *args: Any) -> None:
        """Send a WorkerRequest, and wait until the servers have performed it."""
        self.collect(self.ask(kind, *args))

    def ask(self, kind: int, *args: Any) -> Mailbox:
        mailbox = self._send(kind, args)
        self._board.awaited[self.rank] = mailbox.index + 1
        return mailbox

    def _send(self, method: int, args: tuple[Any, ...], *, silent: bool = False) -> Mailbox:
        mailbox = self._vacant(method)
        segment, room = self.memory.segment, mailbox.area("args")
        spans: list[Span] = []

        def place(tensor: Tensor) -> int:
            # a tensor of the memory that the servers work on is not copied, if the caller waits
            at = segment.offset(tensor) if tensor.device == self._home else None
            if at is None or (silent and at not in self._grads):
                at = mailbox.copy_in(tensor, room)
            spans.append((at, tensor.dtype, tuple(tensor.shape)))
            return at

        words = encode(args, place)
        mailbox.request[HEAD_WORDS - 1] = method
        put(mailbox.request, words)
        if self.journal is not None:  # first: a call must not be visible before its log records are
            if method >= 0:
                self.journal.record(ASK if only_asks_when(method) else POST, method_of(method))
            else:
                self.journal.flush()
        self._count += 1
        board = self._board
        board.posted[mailbox.index] = call_number(self.generation, self._count)
        if self._reach:
            self._reach.post(mailbox, words, spans)
            if method in self._gave and not silent:  # a reply that is faster than this is in the mailbox
                self._reach.expect(mailbox, self._landing(mailbox, *self._gave[method]))
        if not silent:
            self._ring()
        return mailbox

    def _vacant(self, method: int) -> Mailbox:
        """A mailbox that is not in use."""
        if self._void:
            self._free += [mailbox for mailbox in self._void if self.ready(mailbox)]
            self._void = [mailbox for mailbox in self._void if mailbox not in self._free]
        if not self._free:
            self._settle()
        if not self._free and method < 0 and self._void:  # the last checkpoint must not fail because guards are false
            self._free.append(self._void.pop(0))
        if not self._free:
            raise SchemeError(
                f"worker:{self.rank} has {MAILBOXES} calls under way; await some before it starts another"
            )
        return self._free.pop()

    def ready(self, mailbox: Mailbox) -> bool:
        number = self._board.posted[mailbox.index]
        return all(answered[mailbox.index] == number for answered in self._answered)

    def collect(self, mailbox: Mailbox) -> Any:
        """Wait for a call's result."""
        self._awaited(mailbox)
        segment, own = self.memory.segment, self.device.type == "cpu"
        landing = self._reach.landed(mailbox) if self._reach else None
        spans: list[Span] = []

        def tensor(offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
            if landing is not None and landing.is_for(offset, dtype, shape):
                return landing.tensor
            if landing is not None:  # another shape than the last result
                landing.put_back(segment)
            spans.append((offset - mailbox.reply_at, dtype, shape))
            found = segment.tensor(offset, dtype, shape)
            return self._recycled.copy(found) if own else found.to(self.device)

        (result,) = decode(got(mailbox.reply), tensor)
        if spans and own and self._reach:
            self._learn(mailbox.request[HEAD_WORDS - 1], spans)
        return result

    def _learn(self, method: int, spans: list[Span]) -> None:
        """Remember a result that is one large vector: the next one is received into a block of its own."""
        self._gave.pop(method, None)
        assert self._reach is not None
        _, dtype, shape = spans[0]
        if len(spans) == 1 and len(self._reach) == len(self._servers) and size_of(dtype, shape) >= SMALLEST:
            self._gave[method] = spans[0]

    def _landing(self, mailbox: Mailbox, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> ReceiveBuffer:
        block = self._recycled.block(size_of(dtype, shape))
        return ReceiveBuffer(mailbox.reply_at + at, len(block), block, over(block, dtype, shape))

    def _awaited(self, mailbox: Mailbox) -> None:
        """Wait until a call is answered. The mailbox is free then: the next call will overwrite the result."""
        index, number, answered = mailbox.index, self._board.posted[mailbox.index], self._answered
        self._board.awaited[self.rank] = index + 1
        if len(answered) == 1:
            first = answered[0]
            self._wait_for(lambda: first[index] == number, "the server")
        else:
            self._wait_for(lambda: all(one[index] == number for one in answered), "the servers")
        self._free.append(mailbox)
        if self._reach:
            self._reach.ahead.discard(index)
        if self._silent:  # calls complete in order, so earlier ones have completed
            self._settled()

    def forget(self) -> None:
        """Calls under way are void. Their mailboxes are used again once no server can be reading them."""
        self._void = [mailbox for mailbox in self._mailboxes if not self.ready(mailbox)]
        self._free = [mailbox for mailbox in reversed(self._mailboxes) if mailbox not in self._void]
        self._silent.clear()
        if self._reach is not None:
            self._reach.forget()

    def show(self, *, counts: bool = False) -> None:
        """Fetch the state of servers of other nodes into this node's memory. `counts`: only the first server's numbers
        and what it has counted, which costs little."""
        if not self._reach or (counts and 0 in self._near):
            return
        mailbox = self.ask(COUNT if counts else SHOW)  # also after the stop, for the last evaluation
        self.memory.wakeup.wait(lambda: self.ready(mailbox) or self._given_up())
        if not self.ready(mailbox):
            raise Stopped if self._board.run[STOP] == FAILED else RolledBack
        self._free.append(mailbox)

    def _look(
        self, method: ServerMethod[Any, Any], args: tuple[Any, ...], into: tuple[Tensor | None, ...] = ()
    ) -> tuple[bool, Any]:
        """Perform a method that only reads, at a moment at which no server writes. `into`: the cells that its result
        will be stored in; what they hold after a look that was not successful is of no use."""
        board, state = self._board, self._state
        if into and tensors(args):
            into = ()  # an argument may be in such a cell, and is wanted again if this look is not successful
        mark, performed = board.mark, board.performed
        tries, looks = self._tries
        while tries and looks:
            before, position = mark.tolist(), performed.tolist()
            if any(one % 2 for one in before) or (len(before) > 1 and len(set(position)) > 1):
                looks -= 1
                os.sched_yield()  # let the server run: it may share this core
                continue
            tries -= 1
            if method.when is not None and not method.when(self.memory.scheme, state, *args):
                return False, None
            result = method.function(self.memory.scheme.rates_at(state), state, *args)
            version = state.v
            own = self._kept(result, into) if into else mapped(self._copied, result)
            self.memory.synchronize()
            fence()
            if self._board.run[GENERATION] != self.generation:
                return False, None  # this may be the state that the servers have returned to
            if mark.tolist() == before:
                self._has_read(method, position[0], version if gives(result, self._x) else None)
                return True, own
        return False, None

    def _has_read(self, method: ServerMethod[Any, Any], position: int, version: int | None) -> None:
        """Note that the worker has read the servers' state at a position. `version`: of x, if it has got x."""
        if self.journal is not None:
            self.journal.add(READ, self._methods[method.name], position)
        if version is not None:
            self._held[self.memory.scheme.holder(self.rank)] = version

    def _here(self, method: ServerMethod[Any, Any], args: tuple[Any, ...]) -> Any:
        """Perform a call of an `atomic=False` method on the shared vector, without a lock."""
        state, scheme, v, before = self._open, self.memory.scheme, self._open_v, self.memory.updates
        v[0] = before
        self._tally.caller = holder = scheme.holder(self.rank)
        if self._home.type != "cpu":
            args = tuple([a.to(self._home) if isinstance(a, Tensor) else a for a in args])
        result = method.function(scheme.rates_at(state), state, *args)
        self._board.direct[self.rank] += v[0] - before
        if result is None:
            return None
        if gives(result, self._x):
            self._tally.pulled(holder, before)
        return result if self._in_place else mapped(self._copied, result)

    def _kept(self, result: Any, into: tuple[Tensor | None, ...]) -> Any:
        """A copy of a result for the worker: where it will be stored, as far as it fits there."""
        values, kept = result if isinstance(result, tuple) else (result,), []
        if len(values) != len(into):
            return mapped(self._copied, result)
        for value, cell in zip(values, into, strict=True):
            if not isinstance(value, Tensor):
                kept.append(mapped(self._copied, value))
            elif cell is not None and ((value is self._fitting[0] and cell is self._fitting[1]) or fits(value, cell)):
                self._fitting = value, cell
                kept.append(cell.copy_(value))
            else:
                kept.append(self._copied(value))
        return tuple(kept) if isinstance(result, tuple) else kept[0]

    def _copied(self, tensor: Tensor) -> Tensor:
        """A copy for the worker, on its device."""
        if tensor.device.type == self.device.type == "cpu":
            return self._recycled.copy(tensor)
        return tensor.to(self.device, copy=True)


def fits(value: Tensor, cell: Tensor) -> bool:
    """Whether the assignment of a value to a cell would only copy it."""
    return value.shape == cell.shape and value.dtype is cell.dtype and value.device == cell.device


def gives(value: Any, x: int) -> bool:
    """Whether a result contains the tensor at an address."""
    return x in [tensor.data_ptr() for tensor in tensors(value)]
