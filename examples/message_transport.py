"""A transport of one's own, complete: calls and replies as messages over paceline's authenticated channels.

Every message is a copy: simple, and slower than the transport `tcp`, which receives into memory where the bytes belong.
docs/add-a-transport.md explains it. A test runs the conformance suite on it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from paceline.errors import PacelineError
from paceline.network.calls.tcp_client import address_of, words_of
from paceline.network.secure import tls
from paceline.network.secure.admission import AdmissionListener, enter, listener
from paceline.network.secure.channel import Channel, Closed, ProtocolError
from paceline.processes.calls.mailbox import Mailbox, got, put
from paceline.processes.calls.zero_copy import ReceiveBuffer
from paceline.processes.memory.board import FAILED, GENERATION, MAILBOXES, STOP
from paceline.processes.memory.byte_ranges import Piece, ShardRange, Span, WritableRanges, of_words
from paceline.processes.memory.call_codec import check
from paceline.processes.memory.run_memory import HEAD_WORDS, RunMemory

HELLO, WELCOME, CALL, REPLY, ORDER = range(1, 6)
LIMITS = dict.fromkeys(range(1, 6), 1 << 30)  # the most bytes of a message


def pack(numbers: Iterable[int], words: Sequence[int] = (), pieces: Sequence[Piece] = (), data: bytes = b"") -> bytes:
    """One message: five numbers, the words of a call or a reply, and pieces of memory with their offsets and sizes."""
    head = array("q", [*numbers])
    head.extend([0] * (5 - len(head)) + [len(words), len(pieces), *words, *chain(*pieces)])
    return head.tobytes() + data


def unpack(payload: bytearray, memory: RunMemory, areas: WritableRanges) -> tuple[list[int], array[int]]:
    """The numbers and words of a message. Its pieces are copied to where they belong, if the sender may write there."""
    try:
        numbers = memoryview(payload)[:56].cast("q").tolist()
        words = array("q", payload[56 : 56 + 8 * numbers[5]])
        places = array("q", payload[56 + 8 * numbers[5] : 56 + 8 * numbers[5] + 16 * numbers[6]])
        at, pieces = 56 + 8 * numbers[5] + 16 * numbers[6], list(zip(places[::2], places[1::2], strict=True))
        if words:
            check(words, lambda offset, size: (offset, size) in areas)
    except (ValueError, TypeError, IndexError) as error:
        raise ProtocolError(f"a message that cannot be read: {error}") from None
    if any(piece not in areas for piece in pieces) or len(payload) != at + sum(size for _, size in pieces):
        raise ProtocolError("a message with pieces that are not the sender's to write")
    for offset, size in pieces:
        memory.segment.memory[offset : offset + size] = payload[at : at + size]
        at += size
    return numbers, words


class Connection:
    """A channel that sends and receives while its process waits. `take` gets every message; `lost` hears of the end."""

    def __init__(self, memory: RunMemory, channel: Channel, take: Callable[[int, bytearray], None], lost: Callable[[], None]) -> None:  # fmt: skip  # noqa: E501
        self._wakeup, self._channel, self._take, self._lost = memory.wakeup, channel, take, lost
        self.port, self.peer, self.met = 0, -1, False
        self._wakeup.attend(channel.fileno(), lambda: self._guarded(self._receive))

    def send(self, kind: int, message: bytes) -> None:
        self._guarded(lambda: self._channel.send(kind, message))

    def _receive(self) -> None:
        self._channel.flush()
        for kind, payload in self._channel.receive():
            self._take(kind, payload)

    def _guarded(self, act: Callable[[], object]) -> None:
        try:
            act()
            # 1: wait for bytes to read; 4: and until more can be sent
            self._wakeup.modify(self._channel.fileno(), 5 if self._channel.pending else 1)
        except (Closed, ProtocolError):
            self.close()
            self._lost()

    def flush(self) -> None:
        self._guarded(lambda: self._channel.flush(10))

    def close(self) -> None:
        if self._channel.fileno() >= 0:
            self._wakeup.ignore(self._channel.fileno())
            self._channel.close()


def connect(memory: RunMemory, shard: int) -> Channel | None:
    """A channel to a server, by the address that it has written on the board; None if that fails."""
    board, node = memory.board, memory.node
    assert node.secret is not None
    address = address_of(board.server_high[shard], board.server_low[shard])
    try:
        found = enter(address, board.server_port[shard], node.secret, timeout=2.0, tls=tls.client_side(node))
    except (OSError, PacelineError):
        return None  # it may be about to begin, or about to be replaced
    return Channel(found, limits=LIMITS)


class MessageCalls:
    """RemoteCalls: a worker's side. The mailboxes are in the worker's memory; a message carries what is in one."""

    def __init__(self, memory: RunMemory, rank: int, mailboxes: list[Mailbox], ended: Callable[[], bool]) -> None:
        self.latest, self.ahead = 0, set[int]()
        self._memory, self._rank, self._mailboxes, self._ended = memory, rank, mailboxes, ended
        self._areas = WritableRanges(memory.spans_from_server(rank))
        self._servers: dict[int, Connection | None] = {}
        self.meet()
        self.void()  # calls of a predecessor get no reply here

    def __len__(self) -> int:
        return len(self._servers)

    def meet(self) -> None:
        memory, nodes = self._memory, self._memory.board.server_node
        memory.wakeup.wait(lambda: min(nodes) >= 0 or self._ended())
        far = [shard for shard in range(memory.plan.servers) if not memory.near(shard)]
        for shard in set(self._servers) - set(far):
            self._drop(shard)
            del self._servers[shard]
        self._servers |= {shard: None for shard in far if shard not in self._servers}
        memory.wakeup.restless = self._connect  # called now and then while this worker waits
        self._connect()
        memory.wakeup.wait(lambda: all(one and one.met for one in self._servers.values()) or self._ended())

    def _connect(self) -> bool:
        """Connect to servers that are not connected. True: call this again soon."""
        for shard, server in list(self._servers.items()):
            port = self._memory.board.server_port[shard]
            if server is not None and server.port != port:  # it has been replaced
                self._drop(shard)
            if self._servers[shard] is None and port and not self._ended():
                channel = connect(self._memory, shard)
                if channel is not None:
                    self._greet(shard, port, channel)
        return any(server is None for server in self._servers.values())

    def _greet(self, shard: int, port: int, channel: Channel) -> None:
        def take(kind: int, payload: bytearray) -> None:
            self._take(shard, kind, payload)

        server = Connection(self._memory, channel, take, lambda: self._drop(shard))
        server.port, self._servers[shard] = port, server
        server.send(HELLO, pack([self._rank]))

    def _drop(self, shard: int) -> None:
        server, self._servers[shard] = self._servers[shard], None
        if server is not None:
            server.close()

    def _take(self, shard: int, kind: int, payload: bytearray) -> None:
        board, memory = self._memory.board, self._memory
        answered = board.answered[shard]
        if kind == REPLY:
            index, number = memoryview(payload)[:16].cast("q")
            if index // MAILBOXES != self._rank or not board.posted[index] == number != answered[index]:
                return  # nobody waits for it
            (_, _, version, stop, *_), words = unpack(payload, memory, self._areas)
            if words:
                put(self._mailboxes[index % MAILBOXES].reply, words)
            memory.set_version(0, max(version, memory.versions()[0]))
            if board.run[STOP] < stop <= FAILED:
                board.run[STOP] = stop
            answered[index] = number  # last: now the worker may read the reply
        elif kind == WELCOME and (server := self._servers[shard]) is not None:
            self.latest, server.met = max(self.latest, unpack(payload, memory, self._areas)[0][0]), True
            # what has no reply is sent again, in order: the server performs it only if it does not have it
            for mailbox in sorted(self._mailboxes, key=lambda one: board.posted[one.index]):
                if board.posted[mailbox.index] != answered[mailbox.index]:
                    self._send(shard, mailbox)

    def post(self, mailbox: Mailbox, words: array[int], spans: list[Span]) -> None:
        for shard, server in list(self._servers.items()):
            if server is not None and server.met:
                self._send(shard, mailbox)

    def _send(self, shard: int, mailbox: Mailbox) -> None:
        memory, server = self._memory, self._servers[shard]
        words = got(mailbox.request)
        pieces = of_words(words, ShardRange.of(memory, shard))
        data = b"".join(bytes(memory.segment.memory[at : at + size]) for at, size in pieces)
        numbers = [mailbox.index, memory.board.posted[mailbox.index], mailbox.request[HEAD_WORDS - 1]]
        if server is not None:
            server.send(CALL, pack(numbers, words, pieces, data))

    def expect(self, mailbox: Mailbox, landing: ReceiveBuffer) -> None:
        """Replies are received into the mailbox."""

    def landed(self, mailbox: Mailbox) -> None:
        return None

    def carry_on(self) -> None:
        """Whatever is left goes when the worker waits."""

    def void(self) -> None:
        for shard in self._servers:
            for mailbox in self._mailboxes:
                self._memory.board.answered[shard][mailbox.index] = self._memory.board.posted[mailbox.index]

    def forget(self) -> None:
        self.ahead.clear()


class MessagePort:
    """CallPort: a server's side. It listens, writes calls into the mailboxes of its own memory, and sends replies."""

    owed = None  # replies are copied at once

    def __init__(self, memory: RunMemory, shard: int, mailboxes: list[Mailbox]) -> None:
        assert memory.node.secret is not None
        self._memory, self._shard, self._mailboxes = memory, shard, mailboxes
        self._peers: dict[int, Connection] = {}  # workers by rank, then servers
        self._new: set[Connection] = set()
        listening = listener(memory.node.address, memory.node.ports)
        secured = tls.server_side(memory.node)
        self._door = AdmissionListener(listening, memory.node.secret, tls=secured, log=print)
        memory.wakeup.attend(self._door.fileno(), self._admit)
        board = memory.board
        board.server_high[shard], board.server_low[shard] = words_of(memory.node.address)
        board.server_port[shard] = listening.getsockname()[1]  # last: now others may connect
        memory.wakeup.ring_all()

    def _admit(self) -> None:
        """Let in who has proved the secret."""
        for found in self._door.pump():
            self._new.add(self._connection(Channel(found, limits=LIMITS)))

    def _connection(self, channel: Channel) -> Connection:
        def lost() -> None:
            self._new.discard(made)
            if self._peers.get(made.peer) is made:
                del self._peers[made.peer]

        made = Connection(self._memory, channel, lambda kind, payload: self._take(made, kind, payload), lost)
        return made

    def _take(self, peer: Connection, kind: int, payload: bytearray) -> None:
        board, memory, rank = self._memory.board, self._memory, peer.peer
        if kind == HELLO and peer in self._new:
            rank, generation, ordered, *_ = unpack(payload, memory, WritableRanges(()))[0]
            if not 0 <= rank < board.workers + board.servers:
                raise ProtocolError(f"there is no role {rank}")
            if (old := self._peers.pop(rank, None)) is not None:
                old.close()
            self._new.discard(peer)
            peer.peer, self._peers[rank] = rank, peer
            own = board.posted[rank * MAILBOXES : (rank + 1) * MAILBOXES].tolist()
            if rank < board.workers:
                peer.send(WELCOME, pack([max(own)]))
            elif generation == board.run[GENERATION]:
                for position in range(ordered, board.get("ordered")):
                    self._tell_order(peer, position)
        elif kind == CALL and 0 <= rank < board.workers:
            index, number = memoryview(payload)[:16].cast("q")
            if index // MAILBOXES != rank:
                raise ProtocolError(f"a call of worker {rank} in mailbox {index}")
            mailbox = self._mailboxes[index]
            if board.posted[index] != number:
                (_, _, method, *_), words = unpack(payload, memory, WritableRanges(memory.spans_from_worker(rank)))
                mailbox.request[HEAD_WORDS - 1] = method
                put(mailbox.request, words)
                board.posted[index] = number  # last: now the server may perform it
            elif board.answered[self._shard][index] == number:
                self.answer(mailbox)  # the reply was lost with a connection
        else:
            raise ProtocolError(f"a message of kind {kind}")

    def far(self, rank: int) -> bool:
        return not self._memory.beside(rank)

    def answer(self, mailbox: Mailbox) -> None:
        memory, board, peer = self._memory, self._memory.board, self._peers.get(mailbox.rank)
        if peer is None:
            return  # it asks again when it is connected
        cut = ShardRange.of(memory, self._shard)
        if mailbox.told is None:  # a predecessor of this server performed the call
            mailbox.told = array("q", got(mailbox.reply))
            mailbox.pieces = of_words(mailbox.told, cut) if mailbox.told else []
        parts = mailbox.data or [memoryview(memory.segment.memory)[at : at + size] for at, size in mailbox.pieces]
        version = memory.versions()[0] if cut.lead else 0
        numbers = [mailbox.index, board.answered[self._shard][mailbox.index], version, board.run[STOP]]
        # the first server sends the words of a reply, every server its range of the vectors
        peer.send(REPLY, pack(numbers, mailbox.told if cut.lead else (), mailbox.pieces, b"".join(parts)))

    def settle(self) -> None:
        """Replies are copied at once."""

    def order(self, position: int) -> None:
        for rank, peer in list(self._peers.items()):
            if rank >= self._memory.board.workers:
                self._tell_order(peer, position)

    def _tell_order(self, peer: Connection, position: int) -> None:
        board = self._memory.board
        at = position % len(board.ring)
        peer.send(ORDER, pack([position, board.ring[at], board.ring_numbers[at], board.run[GENERATION]]))

    def close(self) -> None:
        self._memory.board.server_port[self._shard] = 0
        for peer in [*self._peers.values(), *self._new]:
            peer.flush()
            peer.close()
        self._memory.wakeup.ignore(self._door.fileno())
        self._door.close()


class MessageOrder:
    """CallOrder: a server that does not share memory with the first one hears from it which call is next."""

    def __init__(self, memory: RunMemory, shard: int) -> None:
        self._memory, self._shard = memory, shard
        self.ordered, self._generation = memory.board.performed[shard], memory.board.get("generation")
        self._early: list[list[int]] = []  # of a generation that this server has not returned with yet
        self._lead: Connection | None = None
        memory.wakeup.restless = self._connect

    def _connect(self) -> bool:
        port = self._memory.board.server_port[0]
        if self._lead is not None and self._lead.port != port:
            self._drop()
        if self._lead is None and port and (channel := connect(self._memory, 0)) is not None:
            self._lead = Connection(self._memory, channel, self._take, self._drop)
            self._lead.port = port
            place = self._memory.board.server_place(self._shard)
            self._lead.send(HELLO, pack([place, self._generation, self.ordered]))
        return self._lead is None

    def _drop(self) -> None:
        lead, self._lead = self._lead, None
        if lead is not None:
            lead.close()

    def _take(self, kind: int, payload: bytearray) -> None:
        if kind != ORDER:
            raise ProtocolError(f"a message of kind {kind} from the first server")
        self._note(unpack(payload, self._memory, WritableRanges(()))[0])

    def _note(self, numbers: list[int]) -> None:
        position, entry, number, generation, *_ = numbers
        board = self._memory.board
        if generation > self._generation:
            self._early.append(numbers)
        elif generation == self._generation and position == self.ordered and entry < len(board.posted):
            at = position % len(board.ring)
            board.ring[at], board.ring_numbers[at] = entry, number
            self.ordered += 1

    def go_back(self, generation: int) -> None:
        self.ordered, self._generation = 0, generation
        early, self._early = self._early, []
        for numbers in early:
            self._note(numbers)

    def close(self) -> None:
        self._memory.wakeup.restless = None
        self._drop()


class MessageTransport:
    """The transport itself: `PACELINE_TRANSPORT=message`, once an entry point of `paceline.transports` names it."""

    name = "message"

    def calls(self, memory: RunMemory, rank: int, mailboxes: list[Mailbox], ended: Callable[[], bool]) -> MessageCalls:
        return MessageCalls(memory, rank, mailboxes, ended)

    def port(self, memory: RunMemory, shard: int, mailboxes: list[Mailbox]) -> MessagePort:
        return MessagePort(memory, shard, mailboxes)

    def order(self, memory: RunMemory, shard: int) -> MessageOrder:
        return MessageOrder(memory, shard)
