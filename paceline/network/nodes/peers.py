"""The coordinator's connections with the agents of other nodes: admission, what they send, what they are sent."""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from paceline.config.role_names import parsed
from paceline.network.nodes import protocol
from paceline.network.nodes.agent import RETURNED
from paceline.network.nodes.board_replication import BoardReplica, RemoteWakeups
from paceline.network.nodes.memory_handover import MemoryHandover, identity
from paceline.network.nodes.node_memory import SHARED
from paceline.network.nodes.protocol import NodeMessage
from paceline.network.secure import tls
from paceline.network.secure.admission import AdmissionListener, listener
from paceline.network.secure.channel import Channel, Closed, ProtocolError, plain
from paceline.processes.memory.byte_ranges import WritableRanges
from paceline.processes.memory.segment import WORD
from paceline.processes.memory.snapshot import KEEP, own_names
from paceline.processes.roles.roles import Role, ranks
from paceline.processes.supervisor.launch_memory import LaunchMemory
from paceline.processes.supervisor.supervisor import LOOK
from paceline.runs import checkpoint
from paceline.runs.run_directory import RunDirectory

FIRST = 5.0  # seconds that a newcomer may take to send its first message
LAST = 2.0  # seconds that an agent may take to close its connection at the end of the run

# what ends a connection: the last three come from messages of another shape than agents send
FAULTS = (Closed, ProtocolError, KeyError, TypeError, ValueError)


@dataclass
class Peer:
    """Another node."""

    number: int
    channel: Channel
    host: str
    nonce: str
    mirror: BoardReplica
    machine: str = ""  # identifies its host
    home: int | None = None  # the node whose memory it works on; None: its own
    bulk: protocol.Bulk | None = None
    heard: float = 0.0
    told: float = 0.0
    ready: bool = False  # its task is made
    shared: bool = True  # it sees this node's run directory
    laid_out: bool = False
    checkpoints: set[int] = field(default_factory=set)  # those that were sent there
    parts: list[Role] = field(default_factory=list)  # the roles that it has
    filled: list[Role] = field(default_factory=list)  # the roles whose state has been sent there
    starts: list[Role] = field(default_factory=list)  # the roles to start once the node has received all they need
    leaving: float = 0.0  # since when it has been asked to leave
    saves: bool = False  # a checkpoint is written before it leaves


@dataclass(frozen=True)
class Refusal:
    """Why an agent may not join. `idle`: there is nothing for it to do. `again`: it may try again."""

    why: str
    idle: bool = False
    again: bool = False


# which of the roles that an agent asks for it gets
Choose = Callable[[list[str]], list[str] | Refusal]


class PeerConnections:
    """All peers by number. The coordinator decides about their roles."""

    def __init__(
        self,
        launched: LaunchMemory,
        directory: RunDirectory,
        selector: selectors.BaseSelector,
        port: int,
        tell: Callable[[str, str], None],
    ) -> None:
        self._launched, self._directory, self._selector, self._tell = launched, directory, selector, tell
        self._board = launched.board
        self.remote = RemoteWakeups(selector, launched.board, launched.pipes)
        self._peers: dict[int, Peer] = {}
        self._newcomers: dict[Channel, float] = {}  # admitted and silent so far; since when
        self._registered: dict[int, int] = {}  # descriptors in the selector, and their events
        self._count = 0  # of peers that there have been
        self._inbox = protocol.Inbox(directory.path, RETURNED, partial(tell, "warn"))
        self._nonce = os.urandom(16).hex()
        (directory.path / SHARED).write_text(self._nonce, encoding="ascii")
        node = launched.context.node
        assert node.secret is not None
        listening = listener(node.address, port or node.ports)
        self.port: int = listening.getsockname()[1]
        self._gate = AdmissionListener(listening, node.secret, tls=tls.server_side(node), log=partial(tell, "warn"))
        self._handover: MemoryHandover | None = None
        if node.share:
            self._handover = MemoryHandover(self._nonce, 0, node.secret, launched.descriptors)
            selector.register(self._handover, selectors.EVENT_READ)
        selector.register(self._gate, selectors.EVENT_READ)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    def get(self, number: int) -> Peer | None:
        return self._peers.get(number)

    def of(self, part: Role) -> Peer | None:
        """The peer that has a role."""
        return next((peer for peer in self if part in peer.parts), None)

    # connections

    def watch_descriptors(self) -> None:
        """Have the selector wake for every connection."""
        read, both = selectors.EVENT_READ, selectors.EVENT_READ | selectors.EVENT_WRITE
        wanted = {channel.fileno(): read for channel in self._newcomers}
        for peer in self._peers.values():
            wanted[peer.channel.fileno()] = both if peer.channel.pending else read
            if peer.bulk is not None:
                wanted[peer.bulk.fileno()] = both if peer.bulk.pending else read
        for descriptor in self._registered.keys() - wanted.keys():
            self._selector.unregister(descriptor)
        for descriptor, events in wanted.items():
            if descriptor not in self._registered:
                self._selector.register(descriptor, events)
            elif self._registered[descriptor] != events:
                self._selector.modify(descriptor, events)
        self._registered = wanted

    def admit(self, choose: Choose) -> None:
        """Take in new connections: the first and the second of each agent."""
        if self._handover is not None:
            self._handover.pump()
        for connection in self._gate.pump():
            self._newcomers[Channel(connection, limits=protocol.LIMITS)] = time.monotonic()
        for channel, since in list(self._newcomers.items()):
            try:
                for kind, payload in channel.receive()[:1]:
                    self._newcomers.pop(channel)
                    if kind == NodeMessage.JOIN:
                        self._join(channel, plain(payload), choose)
                    elif kind == NodeMessage.BULK:
                        told = plain(payload)
                        peer = self._peers.get(int(told["node"]))
                        if peer is None or peer.nonce != told["nonce"] or peer.bulk is not None:
                            raise ProtocolError("a second connection without a first one")
                        peer.bulk = protocol.Bulk(channel)
                    else:
                        raise ProtocolError(f"a newcomer began with {NodeMessage(kind).name}")
                if channel in self._newcomers and time.monotonic() - since > FIRST:
                    raise ProtocolError(f"a newcomer sent no first message within {FIRST:g} s")
            except FAULTS as error:
                self._newcomers.pop(channel, None)
                self._close(channel)
                self._tell("warn", f"closed a connection: {error}")

    def _join(self, channel: Channel, told: dict[str, Any], choose: Choose) -> None:
        if told.get("protocol") == protocol.PROTOCOL:
            chosen = choose([str(name) for name in told["parts"]])
        else:
            chosen = Refusal(
                f"it speaks protocol {told.get('protocol')}, this run {protocol.PROTOCOL}: install the same paceline"
            )
        if isinstance(chosen, Refusal):
            channel.send_json(NodeMessage.REFUSE, asdict(chosen))
            channel.flush(1.0)
            self._close(channel)
            if not chosen.idle and not chosen.again:
                self._tell("warn", f"refused a process on {told.get('host')}: {chosen.why}")
            return
        self._count += 1
        now = time.monotonic()
        host, nonce, machine = str(told["host"]), str(told["nonce"]), str(told.get("machine", ""))
        peer = Peer(self._count, channel, host, nonce, BoardReplica(self._board), machine, heard=now)
        peer.parts = [Role(*parsed(name)) for name in chosen]
        beside = self._beside(peer)
        self._peers[peer.number] = peer
        store = self._launched.context.node.store
        welcome = {
            "plan": asdict(self._launched.plan),
            "node": peer.number,
            "servers": self._board.servers,
            "nonce": self._nonce,
            "beside": beside,
            "store": store[:2] if store is not None else None,
            "clock": time.monotonic_ns(),
        }
        channel.send_json(NodeMessage.WELCOME, welcome)

    def _beside(self, peer: Peer) -> int:
        """The node whose memory a newcomer may share: the first on its host. -1: none."""
        if not peer.machine or any(part.kind == "evaluator" for part in peer.parts):
            return -1
        if self._handover is not None and peer.machine == identity():
            return 0
        alike = (one for one in self if one.ready and one.home is None and one.machine == peer.machine)
        return next((one.number for one in alike), -1)

    def drop(self, peer: Peer) -> bool:
        """Close the connections of a peer. False: it was dropped before."""
        if self._peers.pop(peer.number, None) is None:
            return False
        self._close(peer.channel)
        if peer.bulk is not None:
            self._close(peer.bulk.channel)
        return True

    def _close(self, channel: Channel) -> None:
        if self._registered.pop(channel.fileno(), None) is not None:  # soon it may be that of another connection
            self._selector.unregister(channel.fileno())
        channel.close()

    def say(self, peer: Peer, kind: int, told: dict[str, Any]) -> None:
        """Send a message; if the connection is broken, that is found when it is read."""
        with contextlib.suppress(Closed, ProtocolError):
            peer.channel.send_json(kind, told)

    def release(self, told: dict[str, Any]) -> None:
        """The run is over: tell every agent how it ended, and close all connections."""
        for peer in self:
            with contextlib.suppress(Closed, ProtocolError):
                peer.channel.send_json(NodeMessage.BYE, told)
                peer.channel.flush(5.0)
        for peer in self:
            peer.channel.part(LAST)  # not sooner: an agent that still sends would lose the last message to it
        self.close()
        (self._directory.path / SHARED).unlink(missing_ok=True)

    def close(self) -> None:
        for peer in self:
            peer.channel.close()
            if peer.bulk is not None:
                peer.bulk.channel.close()
        for channel in self._newcomers:
            channel.close()
        self._gate.close()
        if self._handover is not None:
            self._handover.close()

    # receiving

    def received(self, peer: Peer) -> Iterator[tuple[int, Any]]:
        """The messages of a peer that the coordinator decides about, in their order; the others are handled here."""
        for kind, payload in peer.channel.receive():
            peer.heard = time.monotonic()
            match kind:
                case NodeMessage.BOARD if peer.home is None:
                    peer.mirror.hear(payload)
                    if payload:
                        self.remote.ring_local(self._launched.wakeup)
                case NodeMessage.ALARM:
                    self._launched.raise_alarm()
                case NodeMessage.READY | NodeMessage.SAID | NodeMessage.DIED | NodeMessage.LEAVES:
                    yield kind, plain(payload)
        if peer.bulk is not None:
            for kind, payload in peer.bulk.channel.receive():
                peer.heard = time.monotonic()
                self._take_bulk(peer, kind, payload)
        patience = self._launched.plan.patience
        # an agent is silent while it makes its task, which may include fetching data
        silent = time.monotonic() - peer.heard if peer.ready else 0.0
        if silent > patience:
            raise Closed(f"it has not been heard for {patience:g} s")
        if silent > patience / 2:  # processes that wait for it must not time out before this is decided
            self._launched.raise_alarm()

    def _take_bulk(self, peer: Peer, kind: int, payload: bytearray) -> None:
        assert peer.bulk is not None
        match kind:
            case NodeMessage.PIECES if self._launched.opened():
                own = [rank for rank in range(self._launched.plan.workers) if self._board.node[rank] == peer.number]
                names = [KEEP + name for rank in own for name in own_names(self._launched.memory, rank)]
                areas = WritableRanges(self._launched.memory.spans(names))
                protocol.write_piece(payload, self._launched.memory.segment, areas)
            case NodeMessage.AFTER:
                peer.mirror.hear(payload)
                self.remote.ring_local(self._launched.wakeup)
            case NodeMessage.FILE:
                self._inbox.take(payload)
            case NodeMessage.TAKEN:
                peer.bulk.acknowledge(payload)
            case _:
                raise ProtocolError(f"{NodeMessage(kind).name} over the connection for bulk data")

    # sending

    def send_news(self, peer: Peer) -> None:
        """Send a peer the state that it needs, the news of the board, then the roles to start: in this order."""
        if peer.bulk is not None and peer.ready:
            self._supply(peer)
            peer.bulk.feed()
        now = time.monotonic()
        home = peer if peer.home is None else self._peers.get(peer.home)
        held = not peer.ready or (home is not None and (home.bulk is None or home.bulk.busy))
        news = b"" if held or peer.home is not None else peer.mirror.news(self._theirs(peer))
        if news or now - peer.told >= LOOK:
            peer.told = now
            peer.channel.send(NodeMessage.BOARD, news)
        if not held:
            for part in peer.starts:
                peer.channel.send_json(NodeMessage.START, {"part": str(part)})
            peer.starts.clear()
        peer.channel.flush()

    def _theirs(self, peer: Peer) -> list[bool] | None:
        """Which versions of the centre are news for that node."""
        if not peer.laid_out:
            return None
        node, board = peer.number, self._board
        if self._launched.memory.scheme.methods:
            return [board.server_node[0] != node]
        return [board.node[rank] != node for rank in range(self._launched.plan.workers)]

    def _supply(self, peer: Peer) -> None:
        """Send a node the layout, state and checkpoints that it must have before the news of the board."""
        assert peer.bulk is not None
        if peer.home is not None:
            return
        if not peer.laid_out and self._board.get("ready") and self._launched.opened():
            peer.laid_out = True
            segment = self._launched.memory.segment
            text = bytes(segment.memory[WORD : WORD + segment.words[0]])
            peer.bulk.give(protocol.layout(text, self._launched.memory.layout.size))
            peer.mirror.open(self._launched.memory)
            for one in self:
                for part in one.parts if one is peer or one.home == peer.number else ():
                    self.fill(peer, part)
        if peer.shared:
            return
        wanted = {self._board.get("restore")} if self._board.get("generation") else set()
        if any(part.kind == "evaluator" for part in peer.parts):
            wanted.add(self._board.get("checkpoint"))
        for step in wanted - peer.checkpoints - {-1}:
            path = checkpoint.find(self._directory.checkpoints, step)
            if path is not None:
                peer.checkpoints.add(step)
                chosen = sorted(one for one in path.rglob("*") if one.is_file())
                peer.bulk.give(protocol.files(self._directory.path, chosen))

    def fill(self, peer: Peer, part: Role) -> None:
        """Send the state of a role: as it was when the run began, or in the last snapshot."""
        assert peer.bulk is not None
        peer.filled.append(part)
        memory = self._launched.memory
        content = memoryview(memory.segment.memory)
        chosen: list[tuple[int, memoryview]] = []

        def add(target: str, source: str) -> None:
            (offset, size), (at, _) = memory.spans([target, source])
            chosen.append((offset, memoryview(bytes(content[at : at + size]))))

        for rank in ranks(part, self._launched.plan):
            for name in own_names(memory, rank):
                add(name, KEEP + name)
                add(KEEP + name, KEEP + name)
        if part.kind == "server":
            own = (f"server.{part.index}.", f"ledger.{part.index}.")
            names = [name for name in memory.layout.places if name.startswith(own)]
            for name in [*names, *(f"server.{vector}" for vector in memory.layout.notes["vectors"])]:
                add(name, name)
        add("overrides", "overrides")
        peer.bulk.give(protocol.pieces(chosen))
