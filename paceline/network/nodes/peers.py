"""The hub's connections with the agents of other nodes: who is admitted, what is heard of them, what they are sent."""

from __future__ import annotations

import selectors
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.network.nodes import protocol
from paceline.network.nodes.agent import RETURNED
from paceline.network.nodes.board_replication import BoardReplica
from paceline.network.nodes.memory_handover import MemoryHandover, identity
from paceline.network.secure.admission import AdmissionListener
from paceline.network.secure.channel import Channel, Closed, ProtocolError, plain
from paceline.processes.memory.byte_ranges import WritableRanges
from paceline.processes.memory.segment import WORD
from paceline.processes.memory.snapshot import KEEP, own_names
from paceline.processes.roles.main import Role, ranks
from paceline.processes.supervisor.exec_role import part_of
from paceline.processes.supervisor.launcher import LOOK, Supervisor
from paceline.processes.supervisor.recovery import Child
from paceline.runs import checkpoint

FIRST = 5.0  # seconds that a newcomer may take to say who it is


@dataclass
class Peer:
    """Another node."""

    number: int
    channel: Channel
    host: str
    address: str
    nonce: str
    mirror: BoardReplica
    machine: str = ""  # the host that it is on
    home: int | None = None  # whose memory it works on, if that is not its own
    bulk: protocol.Bulk | None = None
    heard: float = 0.0
    told: float = 0.0
    ready: bool = False  # its task is made
    shared: bool = True  # it sees this node's run directory
    laid_out: bool = False
    checkpoints: set[int] = field(default_factory=set)  # those that were sent there
    parts: list[Role] = field(default_factory=list)  # the roles that it has come for, or was given
    filled: list[Role] = field(default_factory=list)  # and whose state has been sent there
    inbox: protocol.Inbox | None = None
    leaving: float = 0.0  # since when it has been asked to leave
    saves: bool = False  # and a checkpoint is written before it goes


class PeerConnections(Supervisor, ABC):
    """The part of a hub that talks."""

    _here: set[str]  # the roles of its own node
    _nonce: str  # of this hub
    _peers: dict[int, Peer]
    _newcomers: dict[Channel, float]  # admitted, and not yet said who they are; since when
    _registered: dict[int, int]  # descriptors that the loop waits for, and what for
    _remote: set[int]  # bells that other nodes are to hear
    _gate: AdmissionListener
    _doorstep: MemoryHandover | None
    _count: int  # of peers that there have been

    def _watch_descriptors(self) -> None:
        read, both = selectors.EVENT_READ, selectors.EVENT_READ | selectors.EVENT_WRITE
        wanted = dict.fromkeys(self._gate.filenos(), read)
        if self._doorstep is not None:
            wanted[self._doorstep.fileno()] = read
        wanted |= {channel.fileno(): read for channel in self._newcomers}
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

    def _forget_descriptor(self, channel: Channel) -> None:
        """Before it is closed: the number may be another's the next moment."""
        if self._registered.pop(channel.fileno(), None) is not None:
            self._selector.unregister(channel.fileno())

    def _admit(self) -> None:
        for descriptor in self._gate.filenos():  # a handshake that ends gives its number to whoever comes next
            if self._registered.pop(descriptor, None) is not None:
                self._selector.unregister(descriptor)
        for connection in self._gate.pump():
            self._newcomers[Channel(connection, limits=protocol.LIMITS)] = time.monotonic()
        for channel, since in list(self._newcomers.items()):
            try:
                for kind, payload in channel.receive()[:1]:
                    self._newcomers.pop(channel)
                    if kind == protocol.JOIN:
                        self._welcome(channel, plain(payload))
                    elif kind == protocol.BULK:
                        self._second(channel, plain(payload))
                    else:
                        raise ProtocolError(f"a newcomer began with a message of kind {kind}")
                if channel in self._newcomers and time.monotonic() - since > FIRST:
                    raise ProtocolError(f"a newcomer did not say who it is within {FIRST:g} s")
            except (Closed, ProtocolError, KeyError, TypeError, ValueError) as error:
                self._newcomers.pop(channel, None)
                self._forget_descriptor(channel)
                channel.close()
                self.tell("warn", f"closed a connection: {error}")

    def _welcome(self, channel: Channel, told: dict[str, Any]) -> None:
        names = [str(name) for name in told["parts"]]
        idle = [name for name in names if name.startswith("server:") and not self.board.servers]
        done = [name for name in names if (child := self._child(name)) is not None and child.done]
        done += [name for name in names if name == "evaluator" and name in self._here]  # the hub's node looks itself
        names = [name for name in names if name not in (*idle, *done)]
        refusals = [why for name in names if (why := self._objection(name))]
        # perhaps by one that has just died, and is not known to have
        taken = [name for name in names if (other := self._child(name)) and self._peer_of(other.part)]
        if told.get("protocol") != protocol.PROTOCOL:
            refusals = [
                f"it speaks protocol {told.get('protocol')}, this run {protocol.PROTOCOL}: install the same paceline"
            ]
        if refusals or not names:
            nothing = f"{self.scheme.name} needs no server: {', '.join(idle)} has nothing to do"
            why = "; ".join(refusals) or (f"{', '.join(done)} has nothing to do any more" if done else nothing)
            again = bool(taken) and len(refusals) == len(taken)
            channel.send_json(protocol.REFUSE, {"why": why, "idle": not refusals, "again": again})
            channel.flush(1.0)
            self._forget_descriptor(channel)
            channel.close()
            if refusals and not again:
                self.tell("warn", f"refused a process on {told.get('host')}: {why}")
            return
        self._count += 1
        now = time.monotonic()
        nonce, host, address = (str(told[key]) for key in ("nonce", "host", "address"))
        peer = Peer(self._count, channel, host, address, nonce, BoardReplica(self.board), heard=now)
        peer.parts = [part_of(name) for name in names]
        peer.machine = str(told.get("machine", ""))
        beside = self._beside(peer)
        self._peers[peer.number] = peer
        channel.send_json(
            protocol.WELCOME,
            {
                "plan": asdict(self.plan),
                "node": peer.number,
                "servers": self.board.servers,
                "nonce": self._nonce,
                "beside": beside,
                "store": self._context.node.store[:2] if self._context.node.store is not None else None,
                "clock": time.monotonic_ns(),
            },
        )

    def _beside(self, peer: Peer) -> int:
        """Whose memory a newcomer may share: that of the first on its host. -1: nobody's."""
        if not peer.machine or any(part.kind == "evaluator" for part in peer.parts):
            return -1
        if self._doorstep is not None and peer.machine == identity():
            return 0
        alike = (one for one in self._peers.values() if one.ready and one.home is None and one.machine == peer.machine)
        return next((one.number for one in alike), -1)

    def _objection(self, name: str) -> str:
        """Why nobody may come for a role, if so."""
        child = self._child(name)
        if child is None and name == "evaluator":
            self.children.append(Child(Role("evaluator")))  # outside of the cluster: it comes if somebody starts one
            self._set_remote(self.board.evaluator, True)
            return ""
        if child is None:
            return f"this run has no {name}; it has: {', '.join(str(one.part) for one in self.children)}"
        if name in self._here:
            return f"{name} is played on the hub's own node"
        other = self._peer_of(child.part)
        return f"{name} is played already, by a process on {other.host}" if other is not None else ""

    def _second(self, channel: Channel, told: dict[str, Any]) -> None:
        peer = self._peers.get(int(told["node"]))
        if peer is None or peer.nonce != told["nonce"] or peer.bulk is not None:
            raise ProtocolError("a second connection of nobody")
        peer.bulk = protocol.Bulk(channel)

    def _hear(self, peer: Peer) -> None:
        for kind, payload in peer.channel.receive():
            peer.heard = time.monotonic()
            match kind:
                case protocol.BOARD if peer.home is None:
                    try:
                        peer.mirror.hear(payload)
                    except ValueError as error:
                        raise ProtocolError(str(error)) from error
                    if payload:
                        self._ring_here()
                case protocol.READY:
                    self._ready(peer, plain(payload))
                case protocol.SAID:
                    told = plain(payload)
                    if (child := self._child(told["part"])) is not None:
                        self._heard(child, told["message"])
                case protocol.DIED:
                    self._died_there(peer, plain(payload))
                case protocol.FROZEN:  # others wait for it: their patience begins when it is back
                    self.board.put("alarm", self.board.get("alarm") + 1)
                case protocol.LEAVES:
                    self._asked_to_leave(peer)
        if peer.bulk is not None:
            for kind, payload in peer.bulk.channel.receive():
                peer.heard = time.monotonic()
                self._take_bulk(peer, kind, payload)
        # while it makes its task, for which it may have to fetch data, it is silent
        silent = time.monotonic() - peer.heard if peer.ready else 0.0
        if silent > self.plan.patience:
            raise Closed(f"it has not been heard for {self.plan.patience:g} s")
        if silent > self.plan.patience / 2:  # whoever waits for it has patience until that is decided
            self.board.put("alarm", self.board.get("alarm") + 1)

    def _take_bulk(self, peer: Peer, kind: int, payload: bytearray) -> None:
        assert peer.bulk is not None
        match kind:
            case protocol.PIECES if self.opened():
                own = [rank for rank in range(self.plan.workers) if self.board.node[rank] == peer.number]
                names = [KEEP + name for rank in own for name in own_names(self.memory, rank)]
                protocol.write_piece(payload, self.memory.segment, WritableRanges(self.memory.spans(names)))
            case protocol.AFTER:
                peer.mirror.hear(payload)
                self._ring_here()
            case protocol.FILE:
                if peer.inbox is None:
                    peer.inbox = protocol.Inbox(self.directory.path, RETURNED, lambda text: self.tell("warn", text))
                peer.inbox.take(payload)
            case protocol.TAKEN:
                if peer.bulk.counted(payload):
                    peer.bulk.answer()
            case _:
                raise ProtocolError(f"a message of kind {kind}")

    def _ring_here(self) -> None:
        for place in range(self.board.roles):
            if place not in self._remote:
                self.wakeup.ring(place)

    def _tell_peer(self, peer: Peer) -> None:
        if peer.bulk is not None and peer.ready:
            self._supply(peer)
            peer.bulk.feed()
        now = time.monotonic()
        home = peer if peer.home is None else self._peers.get(peer.home)
        held = not peer.ready or (home is not None and (home.bulk is None or home.bulk.busy))
        news = b"" if held or peer.home is not None else peer.mirror.news(self._theirs(peer))
        if news or now - peer.told >= LOOK:
            peer.told = now
            peer.channel.send(protocol.BOARD, news)
        if not held:
            for part in peer.parts:
                child = self._child(str(part))
                if child is not None and child.begins:
                    child.begins = False
                    peer.channel.send_json(protocol.START, {"part": str(part)})
        peer.channel.flush()

    def _theirs(self, peer: Peer) -> list[bool] | None:
        """Which versions of the centre are not that node's own to tell."""
        if not peer.laid_out:
            return None
        node, board = peer.number, self.board
        if self.memory.scheme.methods:
            return [board.server_node[0] != node]
        return [board.node[rank] != node for rank in range(self.plan.workers)]

    def _supply(self, peer: Peer) -> None:
        """Send a node what it must have before it may hear of the rest."""
        assert peer.bulk is not None
        if peer.home is not None:
            return
        if not peer.laid_out and self.board.get("ready") and self.opened():
            peer.laid_out = True
            segment = self.memory.segment
            text = bytes(segment.memory[WORD : WORD + segment.words[0]])
            peer.bulk.give(protocol.layout(text, self.memory.layout.size))
            peer.mirror.open(self.memory)
            for one in self._peers.values():
                for part in one.parts if one is peer or one.home == peer.number else ():
                    self._fill(peer, part)
        if peer.shared:
            return
        wanted = {self.board.get("restore")} if self.board.get("generation") else set()
        if any(part.kind == "evaluator" for part in peer.parts):
            wanted.add(self.board.get("checkpoint"))
        for step in wanted - peer.checkpoints - {-1}:
            path = checkpoint.find(self.directory.checkpoints, step)
            if path is not None:
                peer.checkpoints.add(step)
                chosen = sorted(one for one in path.rglob("*") if one.is_file())
                peer.bulk.give(protocol.files(self.directory.path, chosen))

    def _fill(self, peer: Peer, part: Role) -> None:
        """A role's part of the state: as it was when the run began, or in the last snapshot."""
        assert peer.bulk is not None
        peer.filled.append(part)
        memory = self.memory
        content = memoryview(memory.segment.memory)
        chosen: list[tuple[int, memoryview]] = []

        def add(target: str, source: str) -> None:
            (offset, size), (at, _) = memory.spans([target, source])
            chosen.append((offset, memoryview(bytes(content[at : at + size]))))

        for rank in ranks(part, self.plan):
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

    # what a hub decides

    @abstractmethod
    def _child(self, name: str) -> Child | None: ...

    @abstractmethod
    def _peer_of(self, part: Role) -> Peer | None: ...

    @abstractmethod
    def _set_remote(self, place: int, remote: bool) -> None: ...

    @abstractmethod
    def _ready(self, peer: Peer, told: dict[str, Any]) -> None: ...

    @abstractmethod
    def _asked_to_leave(self, peer: Peer) -> None: ...

    @abstractmethod
    def _died_there(self, peer: Peer, told: dict[str, Any]) -> None: ...
