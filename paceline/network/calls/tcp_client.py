"""A worker's calls to servers of other nodes: its mailboxes there are filled over a connection to each server.

The worker connects to the address that the server has written on the board. If a connection breaks, it makes a new one
as soon as a server listens there again; both sides then say how far each mailbox is: no call is lost or repeated.
"""

from __future__ import annotations

import contextlib
import ipaddress
import select
import threading
import time
from array import array
from collections.abc import Callable
from functools import partial

import torch

from paceline.errors import PacelineError, RunError
from paceline.network.calls import early_push
from paceline.network.calls.early_push import EarlyPush
from paceline.network.calls.tcp_connection import AGAIN, EARLY, HELLO, POST, REPLY, WELCOME, Message, TcpConnection
from paceline.network.secure import tls
from paceline.network.secure.admission import Refused, enter, notice_within
from paceline.network.secure.channel import Closed, ProtocolError
from paceline.processes.calls.mailbox import Mailbox, got, put
from paceline.processes.calls.zero_copy import ReceiveBuffer
from paceline.processes.memory.board import FAILED, MAILBOXES, STARTING, STOP
from paceline.processes.memory.byte_ranges import Pieces, ShardRange, Span, WritableRanges, of_spans, of_words
from paceline.processes.memory.call_codec import check
from paceline.processes.memory.run_memory import HEAD_WORDS, RunMemory
from paceline.processes.transport import Final
from paceline.runtime.gradient_forecast import GradientForecast
from paceline.state import Vector

AGAIN_AFTER = 0.05  # seconds between two tries to reach a server
REACH = 2.0  # that one try may take
_NO_GRADIENT: tuple[Vector, int | None] = (torch.empty(0), None)


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


def connected(memory: RunMemory, shard: int, areas: WritableRanges) -> TcpConnection:
    """A connection to a server, by the address on the board. OSError: it may be about to start, or to be replaced."""
    board, node = memory.board, memory.node
    assert node.secret is not None
    address, port = address_of(board.server_high[shard], board.server_low[shard]), board.server_port[shard]
    connection = enter(
        address, port, node.secret, timeout=min(REACH, memory.plan.patience / 2), tls=tls.client_side(node)
    )
    notice_within(connection, memory.plan.patience / 3)
    return TcpConnection(connection, memory.segment, areas, port)


class TcpClient:
    """One worker's connections. `mailboxes` are its own, in the order of their numbers."""

    def __init__(self, memory: RunMemory, rank: int, mailboxes: list[Mailbox], ended: Callable[[], bool]) -> None:
        self._memory, self._rank, self._mailboxes, self._ended = memory, rank, mailboxes, ended
        self._board = memory.board
        self._wires: dict[int, TcpConnection | None] = {}
        self._tried: dict[int, float] = {}
        self._met: dict[int, bool] = {}  # whether a server has said how far it is
        self._lost: dict[int, int] = {}  # since when a server that listens has not been reached, ns
        self._version = memory.version_words()[0]
        self._cuttings = [ShardRange.of(memory, shard) for shard in range(memory.plan.servers)]
        self._courier: BackgroundSender | None = None
        self._landings: dict[int, ReceiveBuffer] = {}  # by mailbox
        self._coming: dict[int, Pieces] = {}  # by server: the pieces that are being received
        self.ahead: set[int] = set()  # mailboxes whose replies are not awaited yet
        self._forecast = GradientForecast()
        self._early: EarlyPush | None = None
        self._gradient: tuple[Vector, int | None] = _NO_GRADIENT  # the last one, and its offset in shared memory
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
        self._memory.wakeup.wait(lambda: min(nodes) >= 0 or self._ended())
        far = {shard for shard in range(self._memory.plan.servers) if not self._memory.near(shard)}
        for shard in set(self._wires) - far:
            self._drop(shard)
            del self._wires[shard]
            self._lost.pop(shard, None)
        for shard in far - set(self._wires):
            self._wires[shard] = None
        if not self._begun:  # calls of a predecessor are not sent again, and their replies are not taken
            self._begun = True
            self.void()
        self._memory.wakeup.restless = self._reconnect if far else None
        self._reconnect()
        self._memory.wakeup.wait(lambda: all(self._met.get(shard) for shard in self._wires) or self._ended())

    def _reconnect(self) -> bool:
        """Try to reach the missing servers, now and then. True: a server is not reached yet."""
        for shard, wire in list(self._wires.items()):
            port = self._board.server_port[shard]
            if wire is not None and wire.port == port:
                continue
            if wire is not None:  # it has a successor elsewhere
                self._drop(shard)
            if self._board.server_state[shard] == STARTING:  # it listens, and answers once it has its state
                port = 0
            if port and time.monotonic() - self._tried.get(shard, -1.0) >= AGAIN_AFTER and not self._ended():
                self._tried[shard] = time.monotonic()
                self._connect(shard)
            if not port:
                self._lost.pop(shard, None)  # no process answers there: the server is down, not the route
            elif not self._met.get(shard):
                self._lost.setdefault(shard, self._memory.now())
        self._tell_cut()
        return any(wire is None for wire in self._wires.values())

    def _tell_cut(self) -> None:
        """Tell the hub, by the board, whether a server is out of reach."""
        shard, since = min(self._lost.items(), key=lambda one: one[1], default=(0, 0))
        if self._board.unreached[self._rank] != since:
            self._board.unreached_server[self._rank], self._board.unreached[self._rank] = shard, since

    def _connect(self, shard: int) -> None:
        try:
            wire = connected(self._memory, shard, WritableRanges(self._memory.spans_from_server(self._rank)))
        except Refused as error:
            raise RunError(f"worker:{self._rank} was refused by server:{shard}: {error}") from error
        except OSError:
            return
        self._wires[shard], self._met[shard] = wire, False
        self._memory.wakeup.attend(wire.fileno(), lambda: self._pull(shard, wire))
        self._guarded(shard, wire, lambda: wire.send(Message(HELLO, self._rank, self._board.get("generation"))))

    def _drop(self, shard: int) -> None:
        wire, self._met[shard] = self._wires.get(shard), False
        if wire is not None:
            self._wires[shard] = None
            self._memory.wakeup.ignore(wire.fileno())
            wire.close()

    def _guarded(self, shard: int, wire: TcpConnection, act: Callable[[], object]) -> None:
        try:
            act()
        except (Closed, ProtocolError) as error:
            with wire.lock:
                if self._wires.get(shard) is wire:
                    if isinstance(error, ProtocolError):
                        print(f"server:{shard} sent what it may not: {error}; connecting again", flush=True)
                    self._drop(shard)
        else:
            if wire.watched != wire.events and self._wires.get(shard) is wire:
                wire.watched = wire.events
                self._memory.wakeup.modify(wire.fileno(), wire.watched)

    def _pull(self, shard: int, wire: TcpConnection) -> None:
        take, look = partial(self._take, shard, wire), partial(self._look, shard, wire)
        self._guarded(shard, wire, lambda: wire.pull(take, look))

    def expect(self, mailbox: Mailbox, landing: ReceiveBuffer) -> None:
        """Receive the result of the call in a mailbox in this buffer, if it fits."""
        self._landings[mailbox.index] = landing

    def landed(self, mailbox: Mailbox) -> ReceiveBuffer | None:
        """The buffer of a call's result, if the parts of all servers were received there."""
        landing = self._landings.pop(mailbox.index, None)
        if landing is not None and len(landing.came) != self._memory.plan.servers:
            landing.put_back(self._memory.segment)
            return None
        return landing

    def forget(self) -> None:
        """No reply is awaited any more."""
        self.ahead.clear()
        self._landings.clear()
        self._early, self._gradient = None, _NO_GRADIENT

    def post(self, mailbox: Mailbox, words: array[int], spans: list[Span]) -> None:
        """Send the call in a mailbox of this node to the same mailbox on the node of every other server."""
        early = self._early_of(spans)
        for shard, wire in self._wires.items():
            if wire is not None and self._met[shard]:
                pieces: Pieces = of_spans(spans, self._cuttings[shard])
                if early is not None:
                    pieces = early.rest(shard, wire, pieces)
                self._post(shard, wire, mailbox, words, pieces)

    # a gradient that is sent while it is computed

    def early(self, v: Vector) -> Final | None:
        self._early = None
        self._gradient = v.detach(), self._memory.segment.offset(v)  # detached: it is the caller who holds a buffer
        gradient, offset = self._gradient
        size = v.numel() * v.element_size()
        if not self._wires or not self._forecast.expected or v.device.type != "cpu" or size < early_push.SMALLEST:
            return None
        if offset is None:
            return None
        there = {shard: wire for shard, wire in self._wires.items() if wire is not None and self._met[shard]}
        ways = {shard: (wire, self._cuttings[shard]) for shard, wire in there.items()}
        self._early = EarlyPush(gradient, offset, ways, self._send_part)
        return self._early.final

    def computed(self, g: Vector) -> None:
        self._forecast.computed(g)

    def _send_part(self, shard: int, wire: TcpConnection, pieces: Pieces) -> None:
        if self._wires.get(shard) is wire:
            self._guarded(shard, wire, lambda: wire.send(Message(EARLY), pieces))
            self.carry_on()

    def _early_of(self, spans: list[Span]) -> EarlyPush | None:
        """Of a call with these tensors: the gradient of which parts have been sent, if it is one of them."""
        gradient, offset = self._gradient
        if offset is None or all(at != offset for at, _, _ in spans):
            return None
        self._forecast.sent(gradient)
        early, self._early, self._gradient = self._early, None, _NO_GRADIENT
        if early is not None and not early.valid:
            self._forecast.missed()
            return None
        return early

    def _post(self, shard: int, wire: TcpConnection, mailbox: Mailbox, words: array[int], pieces: Pieces) -> None:
        own = slice(self._rank * MAILBOXES, (self._rank + 1) * MAILBOXES)
        posted, answered = self._board.posted[own].tolist(), self._board.answered[shard][own].tolist()
        # the server need not keep the answers that are here
        missing = sum([1 << n for n in range(MAILBOXES) if posted[n] != answered[n]])
        number, method = posted[mailbox.number], mailbox.request[HEAD_WORDS - 1]
        message = Message(POST, mailbox.index, number, method, missing, words)
        self._guarded(shard, wire, lambda: wire.send(message, pieces))

    def _wanted(self, shard: int, message: Message) -> bool:
        """Whether a reply is the first to the call in its mailbox; not one to a call that was given up."""
        board, mailbox = self._board, message.mailbox
        return bool(board.posted[mailbox] == message.number != board.answered[shard][mailbox])

    def _look(self, shard: int, wire: TcpConnection, message: Message, pieces: Pieces) -> list[memoryview] | None:
        """Check a reply before its pieces are received, and choose where they are received."""
        if message.kind != REPLY or message.mailbox // MAILBOXES != self._rank or not self._wanted(shard, message):
            return None
        if len(message.words):
            self._check(wire, message)
        landing = self._landings.get(message.mailbox)
        if landing is None or shard in landing.came or not pieces or not all(map(landing.holds, pieces)):
            return None
        self._coming[shard] = pieces
        return [landing.view(piece) for piece in pieces]

    def _take(self, shard: int, wire: TcpConnection, message: Message) -> None:
        board, own = self._board, range(self._rank * MAILBOXES, self._rank * MAILBOXES + MAILBOXES)
        if message.kind == REPLY and message.mailbox in own:
            mailbox = self._mailboxes[message.mailbox - own.start]
            if not self._wanted(shard, message):
                return
            if wire.elsewhere and (landing := self._landings.get(mailbox.index)) is not None:
                landing.came[shard] = self._coming[shard]
            if len(message.words):
                put(mailbox.reply, message.words)
            words = self._memory.segment.words
            if message.value > words[self._version]:
                words[self._version] = message.value
            if board.run[STOP] < message.more <= FAILED:
                board.run[STOP] = message.more
            board.answered[shard][mailbox.index] = message.number
        elif message.kind == WELCOME and len(message.words) == 2 * MAILBOXES and not self._met[shard]:
            self._met[shard] = True
            self._lost.pop(shard, None)
            self._tell_cut()
            self.latest = max(self.latest, *message.words[:MAILBOXES])
            there = zip(self._mailboxes, message.words[:MAILBOXES], message.words[MAILBOXES:], strict=True)
            # in the order in which they were posted: the server performs them so
            for mailbox, posted, answered in sorted(there, key=lambda row: board.posted[row[0].index]):
                mine = board.posted[mailbox.index]
                if board.answered[shard][mailbox.index] == mine:
                    continue
                if posted != mine:
                    asked = array("q", got(mailbox.request))
                    self._post(shard, wire, mailbox, asked, of_words(asked, self._cuttings[shard]))
                elif answered == mine:
                    wire.send(Message(AGAIN, mailbox.index, mine))
        else:
            raise ProtocolError(f"{message.name} for mailbox {message.mailbox}")

    def _check(self, wire: TcpConnection, message: Message) -> None:
        """Refuse a reply that cannot be decoded."""
        try:
            count = check(message.words.tolist(), wire.areas.allows)
        except ValueError as error:
            raise ProtocolError(f"an answer with words that mean nothing here: {error}") from None
        if count != 1:
            raise ProtocolError(f"an answer of {count} values, not 1")

    def void(self) -> None:
        """Run and servers have returned to a checkpoint: earlier calls get no reply."""
        for shard in self._wires:
            for mailbox in self._mailboxes:
                self._board.answered[shard][mailbox.index] = self._board.posted[mailbox.index]

    def busy(self) -> bool:
        """Whether anything is still to be sent, or to come for a call that was started ahead."""
        board = self._board
        return any(wire is not None and wire.pending for wire in self._wires.values()) or any(
            board.answered[shard][mailbox] != board.posted[mailbox]
            for shard in self._wires
            for mailbox in list(self.ahead)
        )

    def carry_on(self) -> None:
        """The worker starts to compute: send and receive in the background."""
        if self.busy():
            if self._courier is None:
                self._courier = BackgroundSender(self._at_work)
            self._courier.wanted.set()

    def _at_work(self) -> list[tuple[TcpConnection, Callable[[], None]]]:
        """The connections while something is still to be sent or received, and what to do when one has news."""
        wires = list(self._wires.items()) if self.busy() else []
        return [(wire, partial(self._pull, shard, wire)) for shard, wire in wires if wire is not None]


class BackgroundSender:
    """A thread that sends and receives while its worker computes, and sleeps otherwise. `at_work`: the connections, and
    what to do when one has news; none when nothing is to be sent or received."""

    def __init__(self, at_work: Callable[[], list[tuple[TcpConnection, Callable[[], None]]]]) -> None:
        self._at_work, self.wanted = at_work, threading.Event()
        threading.Thread(target=self._run, name="courier", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.wanted.wait()
            self.wanted.clear()
            with contextlib.suppress(OSError, ValueError, PacelineError):  # its worker finds the same error
                while connections := self._at_work():
                    poll, handlers = select.poll(), {}
                    for wire, take_in in connections:
                        handlers[wire.fileno()] = take_in
                        poll.register(wire.fileno(), wire.events)
                    for descriptor, _ in poll.poll(100):
                        handlers[descriptor]()
