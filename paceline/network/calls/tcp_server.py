"""A server's side of connections with other nodes: of workers whose calls come from there, and servers that follow it.

Calls are received into the mailboxes of this node's memory, and then count as posted, as those of this node's workers.
Replies go back from the same mailboxes.
"""

from __future__ import annotations

import contextlib
import json
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from paceline.config import build
from paceline.errors import PacelineError
from paceline.network.calls.tcp_client import AGAIN_AFTER, connected, words_of
from paceline.network.calls.tcp_connection import (
    AGAIN,
    EARLY,
    HELLO,
    ORDER,
    POST,
    REPLY,
    WELCOME,
    Message,
    TcpConnection,
)
from paceline.network.secure import tls
from paceline.network.secure.admission import AdmissionListener, listener, notice_within
from paceline.network.secure.channel import Closed, ProtocolError
from paceline.processes.calls.mailbox import COUNT, SAVE, SET, SHOW, Mailbox, got, put, understood
from paceline.processes.calls.zero_copy import PendingReplies
from paceline.processes.memory.board import GENERATION, MAILBOXES, STOP
from paceline.processes.memory.byte_ranges import Piece, Pieces, ShardRange, WritableRanges, of_words
from paceline.processes.memory.packed_words import member_of, method_of
from paceline.processes.memory.run_memory import HEAD_WORDS, OVERRIDES, RunMemory
from paceline.processes.memory.segment import WORD
from paceline.scheme import ServerMethod

LAST = 10.0  # seconds that the last replies may take


def _takes_any_number(method: ServerMethod[Any, Any]) -> bool:
    return any(one.kind is one.VAR_POSITIONAL for one in method.signature.parameters.values())


class TcpServer:
    """One connection for each worker of another node, and for each server there that follows this one."""

    def __init__(self, memory: RunMemory, shard: int, mailboxes: list[Mailbox]) -> None:
        assert memory.node.secret is not None
        self._memory, self._shard, self._mailboxes = memory, shard, mailboxes
        self._board, self._wakeup = memory.board, memory.wakeup
        self._cutting = ShardRange.of(memory, shard)
        self.owed = PendingReplies(memory, shard, mailboxes)
        self._methods = [memory.scheme.methods[name] for name in sorted(memory.scheme.methods)]
        self._bounds, self._version = memory.bounds(shard), memory.version_words()[0]
        # how many values each takes; None: any number
        self._takes = [None if _takes_any_number(method) else len(method.parameters) for method in self._methods]
        self._wires: dict[int, TcpConnection] = {}  # by rank; followers after the ranks
        self._unknown: set[TcpConnection] = set()  # admitted, before their HELLO
        listening = listener(memory.node.address, memory.node.ports)
        self._gate = AdmissionListener(listening, memory.node.secret, tls=tls.server_side(memory.node), log=print)
        high, low = words_of(memory.node.address)
        self._board.server_high[shard], self._board.server_low[shard] = high, low
        self._board.server_port[shard] = port = listening.getsockname()[1]
        if memory.node.ports is not None and port not in memory.node.ports:
            print(f"server:{shard}: port {memory.node.ports} is in use; listening on {port} instead", flush=True)
        self._wakeup.attend(self._gate.fileno(), self._admit)
        self._wakeup.restless = self._admit_again
        self._wakeup.ring_all()

    def _admit(self) -> None:
        for connection in self._gate.pump():
            notice_within(connection, self._memory.plan.patience / 3)
            no_memory = WritableRanges(())  # before its HELLO
            wire = TcpConnection(connection, self._memory.segment, no_memory)
            self._unknown.add(wire)
            self._wakeup.attend(wire.fileno(), lambda wire=wire: self._pull(wire))  # type: ignore[misc]

    def _admit_again(self) -> bool:
        """After the system had no descriptors left, its gate shows new connections only once it has been pumped."""
        if self._gate.exhausted:
            self._admit()
        return self._gate.exhausted

    def _pull(self, wire: TcpConnection) -> None:
        take, look = partial(self._take, wire), partial(self._look, wire)
        self._guarded(wire, lambda: wire.pull(take, look))

    def _guarded(self, wire: TcpConnection, act: Callable[[], object]) -> None:
        try:
            act()
        except (Closed, ProtocolError) as error:
            if isinstance(error, ProtocolError):
                print(f"server:{self._shard}: closed a connection: {error}", flush=True)
            self._drop(wire)
        else:
            if wire.watched != wire.events:
                wire.watched = wire.events
                self._wakeup.modify(wire.fileno(), wire.watched)

    def _drop(self, wire: TcpConnection) -> None:
        self._unknown.discard(wire)
        if self._wires.get(wire.peer) is wire:
            del self._wires[wire.peer]
        self._wakeup.ignore(wire.fileno())
        wire.close()

    def _owns(self, wire: TcpConnection, mailbox: int) -> bool:
        return 0 <= wire.peer < self._board.workers and mailbox // MAILBOXES == wire.peer

    def _look(self, wire: TcpConnection, message: Message, _: Pieces) -> None:
        """Check and decode a call before its pieces are received, which takes longer."""
        if message.kind == POST and self._owns(wire, message.mailbox):
            mailbox = self._mailboxes[message.mailbox]
            mailbox.prepared = message.number, self._understood(wire, mailbox, message)

    def _take(self, wire: TcpConnection, message: Message) -> None:
        board = self._board
        if message.kind == HELLO and wire in self._unknown:
            self._greet(wire, message)
        elif message.kind == POST and self._owns(wire, message.mailbox):
            mailbox = self._mailboxes[message.mailbox]
            if board.posted[mailbox.index] == message.number:
                return  # it came before, over a connection that has broken since
            self.owed.had(wire.peer, message.more)
            mailbox.request[HEAD_WORDS - 1] = message.value
            put(mailbox.request, message.words)
            board.posted[mailbox.index] = message.number
        elif message.kind == EARLY and 0 <= wire.peer < board.workers:
            pass  # a part of a gradient is where it belongs; a call will name it
        elif message.kind == AGAIN and self._owns(wire, message.mailbox):
            mailbox = self._mailboxes[message.mailbox]
            if board.answered[self._shard][mailbox.index] == message.number:
                self.answer(mailbox)
        else:
            raise ProtocolError(f"{message.name} from {wire.peer}")

    def _understood(self, wire: TcpConnection, mailbox: Mailbox, message: Message) -> Any:
        """What a call asks for. One that a worker of this scheme cannot make is refused: mailboxes are performed
        without further checks."""
        kind = message.value
        special = kind in (SAVE, SET, SHOW, COUNT)
        if not special and not 0 <= method_of(kind) < len(self._takes):
            raise ProtocolError(f"call {kind}, which the scheme does not have")
        try:
            words, allowed = message.words.tolist(), wire.areas.allows
            request = understood(self._memory, mailbox, words, kind, self._methods, self._bounds, allowed)
            if kind == SET:
                self._check_overrides(request[1])
        except (ValueError, TypeError, PacelineError) as error:
            raise ProtocolError(f"call {kind} with words that mean nothing here: {error}") from None
        takes, count = 0 if special else self._takes[method_of(kind)], words[0]
        if kind != SET and takes not in (count, None):
            raise ProtocolError(f"call {kind} with {count} values, which the scheme does not have")
        return request

    def _check_overrides(self, values: tuple[Any, ...]) -> None:
        """Refuse hyper-parameters that the scheme does not take."""
        hyper = dict(zip(values[::2], values[1::2], strict=True))
        if not all(isinstance(name, str) for name in hyper) or len(json.dumps(hyper)) > OVERRIDES - WORD:
            raise ValueError("no names, or more than there is room for")
        build.scheme_of(self._memory.scheme, hyper).check(self._board.workers)

    def _greet(self, wire: TcpConnection, message: Message) -> None:
        board, peer = self._board, message.mailbox
        if peer >= board.workers + board.servers:
            raise ProtocolError(f"there is no worker {peer}")
        if (other := self._wires.get(peer)) is not None:
            self._drop(other)
        self._unknown.discard(wire)
        wire.peer, self._wires[peer] = peer, wire
        if peer < board.workers:
            wire.allow(WritableRanges(self._memory.spans_from_worker(peer)))
            own = slice(peer * MAILBOXES, peer * MAILBOXES + MAILBOXES)
            words = array("q", board.posted[own].tolist() + board.answered[self._shard][own].tolist())
            wire.send(Message(WELCOME, peer, words=words))
        elif message.number == board.run[GENERATION]:
            ordered = board.get("ordered")
            if message.value < max(0, ordered - len(board.ring)):
                raise ProtocolError(f"a server that has heard of {message.value} calls, of {ordered}")
            for position in range(message.value, ordered):
                self._tell_order(wire, position)

    def far(self, rank: int) -> bool:
        return not self._memory.beside(rank)

    def answer(self, mailbox: Mailbox) -> None:
        """Send the reply to a call of another node's worker, which has been performed."""
        wire = self._wires.get(mailbox.rank)
        if wire is None:
            return  # it asks again when it has reconnected
        if mailbox.told is None:  # it was performed by a predecessor of this server, if at all
            mailbox.told = array("q", got(mailbox.reply))
            mailbox.pieces = of_words(mailbox.told, self._cutting) if mailbox.told else []
        told = mailbox.told if self._cutting.lead else array("q")
        data: Sequence[memoryview | Piece] | None = mailbox.data
        if owed := self.owed.of(mailbox):
            source, *place = owed
            data = [(source, one[1]) if one == tuple(place) else one for one in mailbox.pieces]
        version = self._memory.segment.words[self._version] if self._shard == 0 else 0
        number = self._board.answered[self._shard][mailbox.index]
        # a worker that reads the last update reads the stop too
        message = Message(REPLY, mailbox.index, number, version, self._board.run[STOP], words=told)
        self._guarded(wire, lambda: wire.send(message, mailbox.pieces, data))

    def settle(self) -> None:
        """The state is about to change: copy replies in it that are not sent yet or may be asked for again."""
        for mailbox, source, at, size in self.owed.settle():
            if (wire := self._wires.get(mailbox.rank)) is not None:
                wire.move(mailbox.index, source, size, at)

    def order(self, position: int) -> None:
        """Tell the servers of other nodes which call is next."""
        for peer, wire in list(self._wires.items()):
            if peer >= self._board.workers:
                self._guarded(wire, lambda wire=wire: self._tell_order(wire, position))  # type: ignore[misc]

    def _tell_order(self, wire: TcpConnection, position: int) -> None:
        board = self._board
        at, words = position % len(board.ring), array("q", [board.run[GENERATION]])
        wire.send(Message(ORDER, wire.peer, position, board.ring[at], board.ring_numbers[at], words))

    def close(self) -> None:
        """Send the last replies, then close all connections."""
        until = time.monotonic() + LAST
        while any(wire.pending for wire in self._wires.values()) and time.monotonic() < until:
            self._wakeup.wait(lambda: not any(wire.pending for wire in self._wires.values()), 0.1)
        self._board.server_port[self._shard] = 0
        for wire in [*self._wires.values(), *self._unknown]:
            self._drop(wire)
        self._wakeup.restless = None
        self._wakeup.ignore(self._gate.fileno())
        self._gate.close()


class OrderFollower:
    """Receives the order of calls, for a server that does not share memory with the first server."""

    def __init__(self, memory: RunMemory, shard: int) -> None:
        self._memory, self._shard, self._board = memory, shard, memory.board
        self._wire: TcpConnection | None = None
        self._tried = 0.0
        self._early: list[Message] = []  # of a generation that this server has not returned to yet
        self.ordered, self.generation = self._board.performed[shard], self._board.get("generation")
        self._before, memory.wakeup.restless = memory.wakeup.restless, self._restless

    def go_back(self, generation: int) -> None:
        """The run has returned to a checkpoint: the order starts again."""
        self.ordered, self.generation = 0, generation
        early, self._early = self._early, []
        for message in early:
            self._take(message)

    def _restless(self) -> bool:
        soon = self._before is not None and self._before()  # this server's own port
        return self._reconnect() or soon

    def _reconnect(self) -> bool:
        port = self._board.server_port[0]
        if self._wire is not None and self._wire.port != port:
            self._drop()
        if self._wire is None and port and time.monotonic() - self._tried >= AGAIN_AFTER:
            self._tried = time.monotonic()
            with contextlib.suppress(OSError, PacelineError):
                self._wire = wire = connected(self._memory, 0, WritableRanges(()))
                self._memory.wakeup.attend(wire.fileno(), self._pull)
                wire.send(Message(HELLO, self._board.server_place(self._shard), self.generation, self.ordered))
        return self._wire is None

    def _drop(self) -> None:
        assert self._wire is not None
        self._memory.wakeup.ignore(self._wire.fileno())
        self._wire.close()
        self._wire = None

    def _pull(self) -> None:
        wire = self._wire
        if wire is None:
            return
        try:
            wire.pull(self._take)
        except (Closed, ProtocolError):
            self._drop()

    def _take(self, message: Message) -> None:
        board = self._board
        if message.kind != ORDER or len(message.words) != 1:
            raise ProtocolError(f"{message.name} from the first server")
        generation, entry = message.words[0], message.value
        if not (entry < len(board.posted) if entry >= 0 else self._is_member(entry)):
            raise ProtocolError(f"an order of the first server for {entry}, which there is not")
        if generation > self.generation:
            if len(self._early) >= len(board.ring):
                raise ProtocolError("more orders of the first server than it may be ahead by")
            self._early.append(message)
        elif generation == self.generation and message.number == self.ordered:
            at = message.number % len(board.ring)
            board.ring[at], board.ring_numbers[at] = message.value, message.more
            self.ordered += 1

    def _is_member(self, entry: int) -> bool:
        try:
            rank, _ = member_of(entry)
        except ValueError:
            return False
        return rank < self._board.workers

    def close(self) -> None:
        self._memory.wakeup.restless = self._before
        if self._wire is not None:
            self._drop()
