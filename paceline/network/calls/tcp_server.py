"""A server's side of connections with other nodes: workers whose calls come from there, and servers that follow it.

Calls are received into the lanes of this node's memory, and then count as posted: the desk does not know the
difference. Answers go back from the same lanes.
"""

from __future__ import annotations

import contextlib
import json
import time
from array import array
from collections.abc import Callable, Sequence

import torch

from paceline.config import build
from paceline.errors import PacelineError
from paceline.network.calls.tcp_client import AGAIN_AFTER, REACH, address_of, words_of
from paceline.network.calls.tcp_connection import AGAIN, HELLO, ORDER, POST, REPLY, WELCOME, Message, TcpConnection
from paceline.network.secure import tls
from paceline.network.secure.admission import AdmissionListener, enter, listener, notice_within
from paceline.network.secure.channel import Closed, ProtocolError
from paceline.processes.calls.mailbox import SAVE, SET, SHOW, TELL, Mailbox, got, put, understood
from paceline.processes.calls.zero_copy import PendingReplies
from paceline.processes.memory.board import GENERATION, LANES, STOP
from paceline.processes.memory.byte_ranges import Piece, ShardRange, WritableRanges, of_words
from paceline.processes.memory.call_codec import check, decode
from paceline.processes.memory.run_memory import HEAD_WORDS, OVERRIDES, RunMemory
from paceline.processes.memory.segment import WORD
from paceline.runs.order_log import MemberEvent

LAST = 10.0  # seconds that the last answers may take to go
_NO_TENSOR = torch.empty(0)


class TcpServer:
    """Who comes in: one connection for each worker of another node, and for each server that follows from there."""

    def __init__(self, stage: RunMemory, shard: int, lanes: list[Mailbox]) -> None:
        assert stage.node.secret is not None
        self._stage, self._shard, self._lanes = stage, shard, lanes
        self._board, self._bells = stage.board, stage.bells
        self._cutting = ShardRange.of(stage, shard)
        self.owed = PendingReplies(stage, shard, lanes)
        self._methods = [stage.scheme.methods[name] for name in sorted(stage.scheme.methods)]
        self._bounds = stage.bounds(shard)
        # how many values each takes; None: any number
        self._takes = [
            None
            if any(one.kind is one.VAR_POSITIONAL for one in method.signature.parameters.values())
            else len(method.parameters)
            for method in self._methods
        ]
        self._wires: dict[int, TcpConnection] = {}  # by rank; followers after the ranks
        self._unknown: set[TcpConnection] = set()  # admitted, and not yet said who it is
        self._attended: set[int] = set()
        listening = listener(stage.node.address, stage.node.ports)
        self._gate = AdmissionListener(
            listening, stage.node.secret, tls=tls.server_side(stage.node), log=lambda text: print(text)
        )
        high, low = words_of(stage.node.address)
        self._board.server_high[shard], self._board.server_low[shard] = high, low
        self._board.server_port[shard] = port = listening.getsockname()[1]
        if stage.node.ports is not None and port not in stage.node.ports:
            print(f"server:{shard}: port {stage.node.ports} is in use; listening on {port} instead", flush=True)
        self._watch_gate()
        self._bells.ring_all()

    def _watch_gate(self) -> None:
        wanted = set(self._gate.filenos())
        for descriptor in self._attended - wanted:
            self._bells.ignore(descriptor)
        for descriptor in wanted - self._attended:
            self._bells.attend(descriptor, self._knocked)
        self._attended = wanted

    def _knocked(self) -> None:
        for descriptor in self._attended:  # one that is closed meanwhile may be another's already
            self._bells.ignore(descriptor)
        self._attended = set()
        for connection in self._gate.pump():
            notice_within(connection, self._stage.plan.patience / 3)
            wire = TcpConnection(
                connection, self._stage.segment, WritableRanges(())
            )  # nothing may be written before it says who it is
            self._unknown.add(wire)
            self._bells.attend(wire.fileno(), lambda wire=wire: self._pull(wire))  # type: ignore[misc]
        self._watch_gate()

    def _pull(self, wire: TcpConnection) -> None:
        def both() -> None:
            if wire.pending:
                wire.push()
            wire.pull(lambda message: self._take(wire, message), lambda message, _: self._look(wire, message))

        self._guarded(wire, both)

    def _guarded(self, wire: TcpConnection, act: Callable[[], object]) -> None:
        try:
            act()
        except (Closed, ProtocolError) as error:
            if isinstance(error, ProtocolError):
                print(f"server:{self._shard}: closed a connection: {error}", flush=True)
            self._drop(wire)
        else:
            self._bells.modify(wire.fileno(), wire.events)

    def _drop(self, wire: TcpConnection) -> None:
        self._unknown.discard(wire)
        if self._wires.get(wire.peer) is wire:
            del self._wires[wire.peer]
        self._bells.ignore(wire.fileno())
        wire.close()

    def _look(self, wire: TcpConnection, message: Message) -> None:
        """What may be known of a message before its pieces are received, which takes longer."""
        if message.kind == POST and 0 <= wire.peer < self._board.workers and message.lane // LANES == wire.peer:
            self._check(wire, message)
            lane, words = self._lanes[message.lane], message.words.tolist()
            request = understood(self._stage, lane, words, message.value, self._methods, self._bounds)
            lane.prepared = message.number, request

    def _take(self, wire: TcpConnection, message: Message) -> None:
        board = self._board
        if message.kind == HELLO and wire in self._unknown:
            self._greet(wire, message)
        elif message.kind == POST and 0 <= wire.peer < board.workers and message.lane // LANES == wire.peer:
            lane = self._lanes[message.lane]
            if board.posted[lane.index] == message.number:
                return  # it came before, over a connection that has broken since
            self.owed.had(wire.peer, message.more)
            lane.request[HEAD_WORDS - 1] = message.value
            put(lane.request, message.words)
            board.posted[lane.index] = message.number
        elif message.kind == AGAIN and 0 <= wire.peer < board.workers and message.lane // LANES == wire.peer:
            lane = self._lanes[message.lane]
            if board.answered[self._shard][lane.index] == message.number:
                self.answer(lane)
        else:
            raise ProtocolError(f"a message of kind {message.kind} from {wire.peer}")

    def _check(self, wire: TcpConnection, message: Message) -> None:
        """Refuse a call that a worker of this scheme cannot have made: what lies in a lane is performed as it is."""
        kind = message.value
        try:
            count = check(message.words, lambda offset, size: (offset, size) in wire.areas)
            if kind == SET:
                values = decode(message.words.tolist(), lambda *_: _NO_TENSOR)
                hyper = dict(zip(values[::2], values[1::2], strict=True))
                if not all(isinstance(name, str) for name in hyper) or len(json.dumps(hyper)) > OVERRIDES - WORD:
                    raise ValueError("no names, or more than there is room for")
                build.scheme_of(self._stage.scheme, hyper).check(self._board.workers)
        except (ValueError, TypeError, PacelineError) as error:
            raise ProtocolError(f"call {kind} with words that mean nothing here: {error}") from None
        if kind == SET or (kind in (SAVE, SHOW) and not count):
            return
        number = kind - TELL if kind >= TELL else kind
        if not 0 <= number < len(self._takes) or self._takes[number] not in (count, None):
            raise ProtocolError(f"call {kind} with {count} values, which the scheme does not have")

    def _greet(self, wire: TcpConnection, message: Message) -> None:
        board, peer = self._board, message.lane
        if peer >= board.workers + board.servers:
            raise ProtocolError(f"there is no worker {peer}")
        if (other := self._wires.get(peer)) is not None:
            self._drop(other)
        self._unknown.discard(wire)
        wire.peer, self._wires[peer] = peer, wire
        if peer < board.workers:
            wire.areas = WritableRanges(self._stage.spans_from_worker(peer))
            own = slice(peer * LANES, peer * LANES + LANES)
            words = array("q", board.posted[own].tolist() + board.answered[self._shard][own].tolist())
            wire.send(Message(WELCOME, peer, words=words))
        elif message.number == board.run[GENERATION]:
            ordered = board.get("ordered")
            if message.value < max(0, ordered - len(board.ring)):
                raise ProtocolError(f"a server that has heard of {message.value} calls, of {ordered}")
            for position in range(message.value, ordered):
                self._tell_order(wire, position)

    def far(self, rank: int) -> bool:
        return not self._stage.beside(rank)

    def answer(self, lane: Mailbox) -> None:
        """A call of another node's worker is performed: its answer goes there."""
        wire = self._wires.get(lane.rank)
        if wire is None:
            return  # it will ask when it is back
        if lane.told is None:  # a predecessor has performed it, if anybody has
            lane.told = array("q", got(lane.reply))
            lane.pieces = of_words(lane.told, self._cutting) if lane.told else []
        told = lane.told if self._cutting.lead else array("q")
        data: Sequence[memoryview | Piece] | None = lane.data
        if owed := self.owed.of(lane):
            source, *place = owed
            data = [(source, one[1]) if one == tuple(place) else one for one in lane.pieces]
        version = self._stage.versions()[0] if self._shard == 0 else 0
        number = self._board.answered[self._shard][lane.index]
        # who hears of the last update hears of the stop too
        message = Message(REPLY, lane.index, number, version, self._board.run[STOP], words=told)
        self._guarded(wire, lambda: wire.send(message, lane.pieces, data))

    def settle(self) -> None:
        """The state is about to change: what lies there, and has not gone or may be asked for again, is copied."""
        for lane, source, at, size in self.owed.settle():
            if (wire := self._wires.get(lane.rank)) is not None:
                wire.move(lane.index, source, size, at)

    def order(self, position: int) -> None:
        """Tell those who follow on other nodes what comes next."""
        for peer, wire in list(self._wires.items()):
            if peer >= self._board.workers:
                self._guarded(wire, lambda wire=wire: self._tell_order(wire, position))  # type: ignore[misc]

    def _tell_order(self, wire: TcpConnection, position: int) -> None:
        board = self._board
        at = position % len(board.ring)
        number = board.ring_numbers[at]
        words = array("q", [board.run[GENERATION]])
        wire.send(Message(ORDER, wire.peer, position, board.ring[at], number, words))

    def close(self) -> None:
        """The last answers go, then the door is shut."""
        until = time.monotonic() + LAST
        while any(wire.pending for wire in self._wires.values()) and time.monotonic() < until:
            self._bells.wait(lambda: not any(wire.pending for wire in self._wires.values()), 0.1)
        self._board.server_port[self._shard] = 0
        for wire in [*self._wires.values(), *self._unknown]:
            self._drop(wire)
        self._gate.close()


class OrderFollower:
    """How a server on another node than the first hears of the order of the calls."""

    def __init__(self, stage: RunMemory, shard: int) -> None:
        self._stage, self._shard, self._board = stage, shard, stage.board
        self._wire: TcpConnection | None = None
        self._tried = 0.0
        self._early: list[Message] = []  # of a generation that this server has not gone back to yet
        self.ordered, self.generation = self._board.performed[shard], self._board.get("generation")
        stage.bells.restless = self._reconnect

    def go_back(self, generation: int) -> None:
        """The order begins anew."""
        self.ordered, self.generation = 0, generation
        early, self._early = self._early, []
        for message in early:
            self._take(message)

    def _reconnect(self) -> bool:
        stage, board = self._stage, self._board
        port = board.server_port[0]
        if self._wire is not None and self._wire.port != port:
            self._drop()
        if self._wire is not None:
            return False
        if port and time.monotonic() - self._tried >= AGAIN_AFTER:
            self._tried = time.monotonic()
            assert stage.node.secret is not None
            address = address_of(board.server_high[0], board.server_low[0])
            with contextlib.suppress(OSError, PacelineError):
                connection = enter(address, port, stage.node.secret, timeout=REACH, tls=tls.client_side(stage.node))
                notice_within(connection, stage.plan.patience / 3)
                self._wire = wire = TcpConnection(connection, stage.segment, WritableRanges(()))
                wire.port = port
                stage.bells.attend(wire.fileno(), self._pull)
                peer = board.server_place(self._shard)
                wire.send(Message(HELLO, peer, self.generation, self.ordered))
        return self._wire is None

    def _drop(self) -> None:
        assert self._wire is not None
        self._stage.bells.ignore(self._wire.fileno())
        self._wire.close()
        self._wire = None

    def _pull(self) -> None:
        wire = self._wire
        if wire is None:
            return
        try:
            if wire.pending:
                wire.push()
            wire.pull(self._take)
            self._stage.bells.modify(wire.fileno(), wire.events)
        except (Closed, ProtocolError):
            self._drop()

    def _take(self, message: Message) -> None:
        board = self._board
        if message.kind != ORDER or len(message.words) != 1:
            raise ProtocolError(f"a message of kind {message.kind} from the first server")
        generation, entry = message.words[0], message.value
        rank, kind = divmod(-entry, 10)
        if not (
            entry < len(board.posted)
            if entry >= 0
            else rank < board.workers and -kind in (MemberEvent.LEFT, MemberEvent.JOINED, MemberEvent.PARTED)
        ):
            raise ProtocolError(f"an order of the first server for {entry}, which there is not")
        if generation > self.generation:
            if len(self._early) >= len(board.ring):
                raise ProtocolError("more orders of the first server than it may be ahead by")
            self._early.append(message)
        elif generation == self.generation and message.number == self.ordered:
            at = message.number % len(board.ring)
            board.ring[at], board.ring_numbers[at] = message.value, message.more
            self.ordered += 1

    def close(self) -> None:
        self._stage.bells.restless = None
        if self._wire is not None:
            self._drop()
