"""A worker's way to servers of other nodes: the same lanes, filled on the other side by a connection to each server.

A server is called by the address that it has written on the board. If a connection breaks, a new one is made as soon as
somebody listens there again; both sides then say how far each lane is, so nothing is lost and nothing performed twice.
"""

from __future__ import annotations

import contextlib
import ipaddress
import select
import threading
import time
from array import array
from collections.abc import Callable

from paceline.errors import PacelineError, RunError
from paceline.network.calls.tcp_connection import AGAIN, HELLO, POST, REPLY, WELCOME, Message, TcpConnection
from paceline.network.secure import tls
from paceline.network.secure.admission import Refused, enter, notice_within
from paceline.network.secure.channel import Closed, ProtocolError
from paceline.processes.calls.mailbox import Mailbox, got, put
from paceline.processes.calls.zero_copy import ReceiveBuffer
from paceline.processes.memory.board import FAILED, LANES, STOP
from paceline.processes.memory.byte_ranges import Pieces, ShardRange, Span, WritableRanges, of_spans, of_words
from paceline.processes.memory.call_codec import check
from paceline.processes.memory.run_memory import HEAD_WORDS, RunMemory

AGAIN_AFTER = 0.05  # seconds between two tries to reach a server
REACH = 2.0  # that one try may take


def address_of(high: int, low: int) -> str:
    """An address as the board has it: in two words."""
    whole = (high & (1 << 64) - 1) << 64 | low & (1 << 64) - 1
    address = ipaddress.IPv6Address(whole)
    return str(address.ipv4_mapped or address)


def words_of(address: str) -> tuple[int, int]:
    """The two words of an address."""
    one = ipaddress.ip_address(address)
    whole = int(ipaddress.IPv6Address(f"::ffff:{one}") if one.version == 4 else one)
    high, low = whole >> 64, whole & (1 << 64) - 1
    return (high - (1 << 64) if high >> 63 else high), (low - (1 << 64) if low >> 63 else low)


class TcpClient:
    """One worker's connections. `lanes` are its own, in the order of their numbers."""

    def __init__(self, stage: RunMemory, rank: int, lanes: list[Mailbox], ended: Callable[[], bool]) -> None:
        self._stage, self._rank, self._lanes, self._ended = stage, rank, lanes, ended
        self._board = stage.board
        self._wires: dict[int, TcpConnection | None] = {}
        self._tried: dict[int, float] = {}
        self._met: dict[int, bool] = {}  # whether a server has said how far it is
        self._lost: dict[int, int] = {}  # since when one that listens has not been reached, ns
        self._version = stage.version_words()[0]
        self._cuttings = [ShardRange.of(stage, shard) for shard in range(stage.plan.servers)]
        self._courier: BackgroundSender | None = None
        self._landings: dict[int, ReceiveBuffer] = {}  # by lane
        self._coming: dict[int, Pieces] = {}  # by server: what goes to one now
        self.ahead: set[int] = set()  # lanes whose answers nobody waits for yet
        self._begun = False
        self.latest = 0  # the highest number of a call that any server knows of this worker
        self.meet()

    def __len__(self) -> int:
        """How many servers are on other nodes."""
        return len(self._wires)

    def meet(self) -> None:
        """Find out which servers are on other nodes, and connect with those that are new there."""
        nodes = self._board.server_node
        # one that has yet to join may come to work on this node's memory
        self._stage.bells.wait(lambda: min(nodes) >= 0 or self._ended())
        far = {shard for shard in range(self._stage.plan.servers) if not self._stage.near(shard)}
        for shard in set(self._wires) - far:
            self._drop(shard)
            del self._wires[shard]
            self._lost.pop(shard, None)
        for shard in far - set(self._wires):
            self._wires[shard] = None
        if not self._begun:  # what a predecessor has sent is its own: nobody sends it again, or takes its answers
            self._begun = True
            self.void()
        self._stage.bells.restless = self._reconnect if far else None
        self._reconnect()
        self._stage.bells.wait(lambda: all(self._met.get(shard) for shard in self._wires) or self._ended())

    def _reconnect(self) -> bool:
        """Try to reach those that are not reached, now and then. True: somebody is not reached yet."""
        for shard, wire in list(self._wires.items()):
            port = self._board.server_port[shard]
            if wire is not None and wire.port == port:
                continue
            if wire is not None:  # it has a successor elsewhere
                self._drop(shard)
            if port and time.monotonic() - self._tried.get(shard, -1.0) >= AGAIN_AFTER and not self._ended():
                self._tried[shard] = time.monotonic()
                self._connect(shard, port)
            if not port:
                self._lost.pop(shard, None)  # nobody listens there: that is the server's loss, not the route's
            elif not self._met.get(shard):
                self._lost.setdefault(shard, self._stage.now())
        self._tell_cut()
        return any(wire is None for wire in self._wires.values())

    def _tell_cut(self) -> None:
        """Write down on the board, which the hub reads, whether a server is out of reach."""
        shard, since = min(self._lost.items(), key=lambda one: one[1], default=(0, 0))
        if self._board.unreached[self._rank] != since:
            self._board.unreached_server[self._rank], self._board.unreached[self._rank] = shard, since

    def _connect(self, shard: int, port: int) -> None:
        stage, board = self._stage, self._board
        assert stage.node.secret is not None
        address = address_of(board.server_high[shard], board.server_low[shard])
        try:
            connection = enter(address, port, stage.node.secret, timeout=REACH, tls=tls.client_side(stage.node))
        except Refused as error:
            raise RunError(f"worker:{self._rank} was refused by server:{shard} at {address}:{port}: {error}") from error
        except OSError:
            return  # it may be about to begin, or about to be replaced
        notice_within(connection, stage.plan.patience / 3)
        wire = TcpConnection(connection, stage.segment, WritableRanges(stage.spans_from_server(self._rank)))
        wire.port = port
        self._wires[shard], self._met[shard] = wire, False
        stage.bells.attend(wire.fileno(), lambda: self._pull(shard, wire))
        self._guarded(shard, wire, lambda: wire.send(Message(HELLO, self._rank, board.get("generation"))))

    def _drop(self, shard: int) -> None:
        wire, self._met[shard] = self._wires.get(shard), False
        if wire is not None:
            self._wires[shard] = None
            self._stage.bells.ignore(wire.fileno())
            wire.close()

    def _guarded(self, shard: int, wire: TcpConnection, act: Callable[[], object]) -> None:
        try:
            act()
        except (Closed, ProtocolError) as error:
            with wire.lock:
                if self._wires.get(shard) is wire:
                    if isinstance(error, ProtocolError):
                        print(f"server:{shard} sent what it may not: {error}; connecting anew", flush=True)
                    self._drop(shard)
        else:
            if self._wires.get(shard) is wire:
                self._stage.bells.modify(wire.fileno(), wire.events)

    def _pull(self, shard: int, wire: TcpConnection) -> None:
        def both() -> None:
            if wire.pending:
                wire.push()
            wire.pull(
                lambda message: self._take(shard, wire, message),
                lambda message, pieces: self._look(shard, wire, message, pieces),
            )

        self._guarded(shard, wire, both)

    def expect(self, lane: Mailbox, landing: ReceiveBuffer) -> None:
        """What was posted in a lane probably has a result that may be received there."""
        self._landings[lane.index] = landing

    def landed(self, lane: Mailbox) -> ReceiveBuffer | None:
        """Where a call's result has come, if all of it has come where it was expected."""
        landing = self._landings.pop(lane.index, None)
        if landing is not None and len(landing.came) != self._stage.plan.servers:
            landing.put_back(self._stage.segment)
            return None
        return landing

    def forget(self) -> None:
        """Nothing is waited for any more."""
        self.ahead.clear()
        self._landings.clear()

    def post(self, lane: Mailbox, words: array[int], spans: list[Span]) -> None:
        """A call lies in a lane of this node: let it lie in that of every other server's node too."""
        for shard, wire in self._wires.items():
            if wire is not None and self._met[shard]:
                self._post(shard, wire, lane, words, of_spans(spans, self._cuttings[shard]))

    def _post(self, shard: int, wire: TcpConnection, lane: Mailbox, words: array[int], pieces: Pieces) -> None:
        posted, answered = self._board.posted, self._board.answered[shard]
        first = self._rank * LANES
        # the server need not keep the answers that are here
        missing = sum(1 << n for n in range(LANES) if posted[first + n] != answered[first + n])
        message = Message(POST, lane.index, posted[lane.index], lane.request[HEAD_WORDS - 1], missing, words)
        self._guarded(shard, wire, lambda: wire.send(message, pieces))

    def _wanted(self, shard: int, message: Message) -> bool:
        """Whether an answer is to the call that lies in its lane, and the first; not to one that was given up."""
        board, lane = self._board, message.lane
        return bool(board.posted[lane] == message.number != board.answered[shard][lane])

    def _look(self, shard: int, wire: TcpConnection, message: Message, pieces: Pieces) -> list[memoryview] | None:
        """Check an answer before its pieces are received, and say where they go."""
        if message.kind != REPLY or message.lane // LANES != self._rank or not self._wanted(shard, message):
            return None
        if len(message.words):
            self._check(wire, message)
        landing = self._landings.get(message.lane)
        if landing is None or shard in landing.came or not pieces or not all(map(landing.holds, pieces)):
            return None
        self._coming[shard] = pieces
        return [landing.view(piece) for piece in pieces]

    def _take(self, shard: int, wire: TcpConnection, message: Message) -> None:
        board, own = self._board, range(self._rank * LANES, self._rank * LANES + LANES)
        if message.kind == REPLY and message.lane in own:
            lane = self._lanes[message.lane - own.start]
            if not self._wanted(shard, message):
                return
            if wire.elsewhere and (landing := self._landings.get(lane.index)) is not None:
                landing.came[shard] = self._coming[shard]
            if len(message.words):
                put(lane.reply, message.words)
            words = self._stage.segment.words
            if message.value > words[self._version]:
                words[self._version] = message.value
            if board.run[STOP] < message.more <= FAILED:
                board.run[STOP] = message.more
            board.answered[shard][lane.index] = message.number
        elif message.kind == WELCOME and len(message.words) == 2 * LANES and not self._met[shard]:
            self._met[shard] = True
            self._lost.pop(shard, None)
            self._tell_cut()
            self.latest = max(self.latest, *message.words[:LANES])
            there = zip(self._lanes, message.words[:LANES], message.words[LANES:], strict=True)
            # in the order in which they were posted: the server performs them so
            for lane, posted, answered in sorted(there, key=lambda row: board.posted[row[0].index]):
                mine = board.posted[lane.index]
                if board.answered[shard][lane.index] == mine:
                    continue
                if posted != mine:
                    asked = array("q", got(lane.request))
                    self._post(shard, wire, lane, asked, of_words(asked, self._cuttings[shard]))
                elif answered == mine:
                    wire.send(Message(AGAIN, lane.index, mine))
        else:
            raise ProtocolError(f"a message of kind {message.kind} for lane {message.lane}")

    def _check(self, wire: TcpConnection, message: Message) -> None:
        """Refuse an answer that nobody could read."""
        try:
            count = check(message.words, lambda offset, size: (offset, size) in wire.areas)
        except ValueError as error:
            raise ProtocolError(f"an answer with words that mean nothing here: {error}") from None
        if count != 1:
            raise ProtocolError(f"an answer of {count} values, not 1")

    def void(self) -> None:
        """The run has gone back to a checkpoint, and so have the servers: nobody will answer what was posted before."""
        for shard in self._wires:
            for lane in self._lanes:
                self._board.answered[shard][lane.index] = self._board.posted[lane.index]

    def busy(self) -> bool:
        """Whether anything is still to be sent, or to come for a call that was started ahead."""
        board = self._board
        return any(wire is not None and wire.pending for wire in self._wires.values()) or any(
            board.answered[shard][lane] != board.posted[lane] for shard in self._wires for lane in list(self.ahead)
        )

    def carry_on(self) -> None:
        """This worker goes to compute: what is under way goes on meanwhile."""
        if self.busy():
            if self._courier is None:
                self._courier = BackgroundSender(self)
            self._courier.wake()

    def at_work(self) -> list[tuple[TcpConnection, Callable[[], None]]]:
        """The connections that there are, and what to do when one has news."""
        return [
            (wire, lambda shard=shard, wire=wire: self._pull(shard, wire))  # type: ignore[misc]
            for shard, wire in list(self._wires.items())
            if wire is not None
        ]


class BackgroundSender:
    """A thread that sends and receives while its worker computes, and sleeps otherwise."""

    def __init__(self, reach: TcpClient) -> None:
        self._reach, self._wanted = reach, threading.Event()
        threading.Thread(target=self._run, name="courier", daemon=True).start()

    def wake(self) -> None:
        self._wanted.set()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            with contextlib.suppress(OSError, ValueError, PacelineError):  # its worker will find what is wrong
                while self._reach.busy():
                    poll, handlers = select.poll(), {}
                    for wire, take_in in self._reach.at_work():
                        handlers[wire.fileno()] = take_in
                        poll.register(wire.fileno(), wire.events)
                    if not handlers:
                        break
                    for descriptor, _ in poll.poll(100):
                        handlers[descriptor]()
