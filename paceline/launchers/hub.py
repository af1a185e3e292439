"""The launcher of a run on several nodes: that of the node with the chief. The roles of other nodes are started and
watched by their agents; what becomes of them is decided here, as for those of this node.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline import checkpoint
from paceline.board import FAILED, RUNNING, STOP
from paceline.errors import RunError
from paceline.launchers import talk
from paceline.launchers.agent import RETURNED, SHARED
from paceline.launchers.beside import Doorstep, identity
from paceline.launchers.local import LOOK, Launcher
from paceline.launchers.program import part_of
from paceline.launchers.recovery import Child
from paceline.memory import WORD
from paceline.mirror import Mirror
from paceline.net.channel import Channel, Closed, ProtocolError, plain
from paceline.net.gate import Gate, listener
from paceline.plan import Plan
from paceline.role import Part, places, ranks
from paceline.scheme import Scheme
from paceline.snapshots import KEEP, own_names
from paceline.stage import Node
from paceline.transports.wire import Areas

FIRST = 5.0  # seconds that a newcomer may take to say who it is
LAST = 2.0  # and an agent to go after the goodbye


@dataclass
class Peer:
    """Another node."""

    number: int
    channel: Channel
    host: str
    address: str
    nonce: str
    mirror: Mirror
    machine: str = ""  # the host that it is on
    home: int | None = None  # whose memory it works on, if that is not its own
    bulk: talk.Bulk | None = None
    heard: float = 0.0
    told: float = 0.0
    ready: bool = False  # its task is made
    shared: bool = True  # it sees this node's run directory
    laid_out: bool = False
    checkpoints: set[int] = field(default_factory=set)  # those that were sent there
    parts: list[Part] = field(default_factory=list)  # the roles that it has come for, or was given
    filled: list[Part] = field(default_factory=list)  # and whose state has been sent there
    inbox: talk.Inbox | None = None


class Hub(Launcher):
    """Runs a plan whose roles are on several nodes. `here`: the roles of this one."""

    def __init__(
        self,
        plan: Plan,
        scheme: Scheme,
        objects: dict[str, Any],
        *,
        node: Node,
        port: int,
        here: set[str],
        join: float,
        tell: Callable[[str, str], None],
        watch: Callable[[Launcher], None],
        listening: Callable[[str, int], None],
    ) -> None:
        if plan.collective == "shared":
            plan = replace(plan, collective="gloo")  # what others have lies in other memories
        super().__init__(plan, scheme, objects, tell=tell, watch=watch)
        self._node, self._here, self._join = node, here, join
        self._props = replace(self._props, node=node)
        self._nonce = os.urandom(16).hex()
        (self.directory.path / SHARED).write_text(self._nonce, encoding="ascii")
        self._peers: dict[int, Peer] = {}
        self._newcomers: dict[Channel, float] = {}
        self._registered: set[int] = set()
        self._away: dict[str, float] = {}  # roles that nobody plays, and since when
        self._began = time.monotonic()
        self._complete = False
        self._count = 0
        assert node.secret is not None
        socket = listener(node.address, port)
        self._gate = Gate(socket, node.secret, tls=node.server_side, log=lambda text: tell("warn", text))
        for child in self.children:
            if str(child.part) not in here:
                self._away[str(child.part)] = self._began
                self._mark(child.part, -1)
        self._remote: set[int] = set()
        for child in self.children:
            for place in places(child.part, plan):
                self._set_remote(place, str(child.part) not in here)
        self._doorstep: Doorstep | None = None
        if node.share:
            self._doorstep = Doorstep(self._nonce, 0, node.secret, [self.board.descriptor, self._state, *self._bells])
        listening(node.address, socket.getsockname()[1])

    # who is where

    def _mark(self, part: Part, node: int) -> None:
        """Write down on which node a role is."""
        for rank in ranks(part, self.plan):
            self.board.node[rank] = node
        if part.kind == "server":
            self.board.server_node[part.index] = node

    def _set_remote(self, place: int, remote: bool) -> None:
        """Whether a bell is heard by this launcher, which tells other nodes, or by a role of this node."""
        end = self._bells[2 * place]
        if remote and place not in self._remote:
            self._remote.add(place)
            self._selector.register(end, selectors.EVENT_READ)
        elif not remote and place in self._remote:
            self._remote.discard(place)
            self._selector.unregister(end)
        self.board.sleeping[place] = int(remote)

    def _child(self, name: str) -> Child | None:
        return next((child for child in self.children if str(child.part) == name), None)

    def _start(self, child: Child) -> None:
        name = str(child.part)
        peer = self._peer_of(child.part)
        if name in self._here:
            for place in places(child.part, self.plan):
                self._set_remote(place, False)
            self._mark(child.part, 0)
            super()._start(child)
        elif peer is not None and peer.ready:
            self._away.pop(name, None)
            home = self._peers.get(peer.number if peer.home is None else peer.home)
            self._mark(child.part, home.number if home is not None else 0)
            for place in places(child.part, self.plan):
                self._set_remote(place, home is not None)
            if home is not None and home.laid_out and child.part not in home.filled:
                self._fill(home, child.part)  # once: what its memory holds afterwards is newer than what is here
            child.begins = True  # once the other node has all that it needs
        else:
            self._away.setdefault(name, time.monotonic())

    def _peer_of(self, part: Part) -> Peer | None:
        return next((peer for peer in self._peers.values() if part in peer.parts), None)

    # the loop's own part

    def _attend(self) -> None:
        for place in self._remote:
            with contextlib.suppress(BlockingIOError):
                os.read(self._bells[2 * place], 4096)
        self._admit()
        if self._doorstep is not None:
            self._doorstep.pump()
        for peer in list(self._peers.values()):
            try:
                self._hear(peer)
            except (Closed, ProtocolError) as error:
                self._lost(peer, str(error))
        for peer in list(self._peers.values()):
            try:
                self._tell_peer(peer)
            except (Closed, ProtocolError) as error:
                self._lost(peer, str(error))
        self._look_for_the_missing()
        self._watch_descriptors()

    def _watch_descriptors(self) -> None:
        wanted = set(self._gate.filenos())
        if self._doorstep is not None:
            wanted.add(self._doorstep.fileno())
        wanted |= {channel.fileno() for channel in self._newcomers}
        for peer in self._peers.values():
            wanted |= {peer.channel.fileno()} | ({peer.bulk.fileno()} if peer.bulk is not None else set())
        for descriptor in self._registered - wanted:
            self._selector.unregister(descriptor)
        for descriptor in wanted - self._registered:
            self._selector.register(descriptor, selectors.EVENT_READ)
        self._registered = wanted

    def _forget_descriptor(self, channel: Channel) -> None:
        """Before it is closed: the number may be another's the next moment."""
        if channel.fileno() in self._registered:
            self._registered.discard(channel.fileno())
            self._selector.unregister(channel.fileno())

    def _admit(self) -> None:
        for descriptor in set(self._gate.filenos()) & self._registered:
            self._registered.discard(descriptor)
            self._selector.unregister(descriptor)
        for connection in self._gate.pump():
            self._newcomers[Channel(connection, limits=talk.LIMITS)] = time.monotonic()
        for channel, since in list(self._newcomers.items()):
            try:
                for kind, payload in channel.receive()[:1]:
                    self._newcomers.pop(channel)
                    if kind == talk.JOIN:
                        self._welcome(channel, plain(payload))
                    elif kind == talk.BULK:
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
        names = [name for name in names if name not in (*idle, *done)]
        refusals = [why for name in names if (why := self._objection(name))]
        # perhaps by one that has just died, and is not known to have
        taken = [name for name in names if (other := self._child(name)) and self._peer_of(other.part)]
        if told.get("protocol") != talk.PROTOCOL:
            refusals = [
                f"it speaks protocol {told.get('protocol')}, this run {talk.PROTOCOL}: install the same paceline"
            ]
        if refusals or not names:
            nothing = f"{self.scheme.name} needs no server: {', '.join(idle)} has nothing to do"
            why = "; ".join(refusals) or (f"{', '.join(done)} has done its part" if done else nothing)
            again = bool(taken) and len(refusals) == len(taken)
            channel.send_json(talk.REFUSE, {"why": why, "idle": not refusals, "again": again})
            channel.flush(1.0)
            self._forget_descriptor(channel)
            channel.close()
            if refusals and not again:
                self.tell("warn", f"refused a process on {told.get('host')}: {why}")
            return
        self._count += 1
        now = time.monotonic()
        nonce, host, address = (str(told[key]) for key in ("nonce", "host", "address"))
        peer = Peer(self._count, channel, host, address, nonce, Mirror(self.board), heard=now)
        peer.parts = [part_of(name) for name in names]
        peer.machine = str(told.get("machine", ""))
        beside = self._beside(peer)
        self._peers[peer.number] = peer
        channel.send_json(
            talk.WELCOME,
            {
                "plan": asdict(self.plan),
                "node": peer.number,
                "servers": self.board.servers,
                "nonce": self._nonce,
                "beside": beside,
                "store": self._props.node.store[:2] if self._props.node.store is not None else None,
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
            self.children.append(Child(Part("evaluator")))  # outside of the cluster: it comes if somebody starts one
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
        peer.bulk = talk.Bulk(channel)

    def _hear(self, peer: Peer) -> None:
        for kind, payload in peer.channel.receive():
            peer.heard = time.monotonic()
            match kind:
                case talk.BOARD if peer.home is None:
                    try:
                        peer.mirror.hear(payload)
                    except ValueError as error:
                        raise ProtocolError(str(error)) from error
                    if payload:
                        self._ring_here()
                case talk.READY:
                    self._ready(peer, plain(payload))
                case talk.SAID:
                    told = plain(payload)
                    if (child := self._child(told["part"])) is not None:
                        self._heard(child, told["message"])
                case talk.DIED:
                    self._died_there(peer, plain(payload))
                case talk.FROZEN:
                    self._frozen(peer, plain(payload))
        if peer.bulk is not None:
            for kind, payload in peer.bulk.channel.receive():
                peer.heard = time.monotonic()
                self._take_bulk(peer, kind, payload)
        # while it makes its task, for which it may have to fetch data, it is silent
        if peer.ready and time.monotonic() - peer.heard > self.plan.patience:
            raise Closed(f"it has not been heard for {self.plan.patience:g} s")

    def _take_bulk(self, peer: Peer, kind: int, payload: bytearray) -> None:
        assert peer.bulk is not None
        match kind:
            case talk.PIECES if self.opened():
                own = [rank for rank in range(self.plan.workers) if self.board.node[rank] == peer.number]
                names = [KEEP + name for rank in own for name in own_names(self.stage, rank)]
                talk.write_piece(payload, self.stage.segment, Areas(self.stage.spans(names)))
            case talk.AFTER:
                peer.mirror.hear(payload)
                self._ring_here()
            case talk.FILE:
                if peer.inbox is None:
                    peer.inbox = talk.Inbox(self.directory.path, RETURNED, lambda text: self.tell("warn", text))
                peer.inbox.take(payload)
            case talk.TAKEN:
                if peer.bulk.counted(payload):
                    peer.bulk.answer()
            case _:
                raise ProtocolError(f"a message of kind {kind}")

    def _ring_here(self) -> None:
        for place in range(self.board.roles):
            if place not in self._remote:
                self.bells.ring(place)

    def _ready(self, peer: Peer, told: dict[str, Any]) -> None:
        peer.ready, peer.shared, home = True, bool(told["shared"]), int(told["beside"])
        if home >= 0:
            if home and home not in self._peers:
                raise Closed("the node whose memory it shares is gone")
            peer.home = home
        for part in peer.parts:
            child = self._child(str(part))
            assert child is not None
            if self._complete:
                self.tell("say", f"{part} is here, on {peer.host}")
                self._restore_absent(part)
            self._start(child)

    def _frozen(self, peer: Peer, told: dict[str, Any]) -> None:
        self.board.put("alarm", self.board.get("alarm") + 1)
        if "leaves" in told:
            self.tell("say", f"{told['leaves']} was asked to end; ending the run in order")
            self.stop(f"{told['leaves']} was asked to end")

    # what another node needs

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
            peer.channel.send(talk.BOARD, news)
        if not held:
            for part in peer.parts:
                child = self._child(str(part))
                if child is not None and child.begins:
                    child.begins = False
                    peer.channel.send_json(talk.START, {"part": str(part)})
        peer.channel.flush()

    def _theirs(self, peer: Peer) -> list[bool] | None:
        """Which versions of the centre are not that node's own to tell."""
        if not peer.laid_out:
            return None
        node, board = peer.number, self.board
        if self.stage.scheme.methods:
            return [board.server_node[0] != node]
        return [board.node[rank] != node for rank in range(self.plan.workers)]

    def _supply(self, peer: Peer) -> None:
        """Send a node what it must have before it may hear of the rest."""
        assert peer.bulk is not None
        if peer.home is not None:
            return
        if not peer.laid_out and self.board.get("ready") and self.opened():
            peer.laid_out = True
            segment = self.stage.segment
            text = bytes(segment.memory[WORD : WORD + segment.words[0]])
            peer.bulk.give(talk.layout(text, self.stage.layout.size))
            peer.mirror.open(self.stage)
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
                peer.bulk.give(talk.files(self.directory.path, chosen))

    def _fill(self, peer: Peer, part: Part) -> None:
        """A role's part of the state: as it was when the run began, or in the last snapshot."""
        assert peer.bulk is not None
        peer.filled.append(part)
        stage = self.stage
        memory = memoryview(stage.segment.memory)
        chosen: list[tuple[int, memoryview]] = []

        def add(target: str, source: str) -> None:
            (offset, size), (at, _) = stage.spans([target, source])
            chosen.append((offset, memoryview(bytes(memory[at : at + size]))))

        for rank in ranks(part, self.plan):
            for name in own_names(stage, rank):
                add(name, KEEP + name)
                add(KEEP + name, KEEP + name)
        if part.kind == "server":
            own = (f"server.{part.index}.", f"ledger.{part.index}.")
            names = [name for name in stage.layout.places if name.startswith(own)]
            for name in [*names, *(f"server.{vector}" for vector in stage.layout.notes["vectors"])]:
                add(name, name)
        add("overrides", "overrides")
        peer.bulk.give(talk.pieces(chosen))

    # who dies, and who is missing

    def _died_there(self, peer: Peer, told: dict[str, Any]) -> None:
        child = self._child(told["part"])
        if child is None or child.part not in peer.parts:
            return
        self.outcome.peak_rss = max(self.outcome.peak_rss, int(told["memory"]))
        code = int(told["code"])
        if code == 0 or self._over:
            self._finished(child)
        else:
            self._died(child, code)

    def _lost(self, peer: Peer, why: str) -> None:
        """A node is gone, with all that it held."""
        del self._peers[peer.number]
        for channel in [peer.channel, *([peer.bulk.channel] if peer.bulk is not None else [])]:
            self._forget_descriptor(channel)
            channel.close()
        living = [child for part in peer.parts if (child := self._child(str(part))) and not child.done]
        for guest in [one for one in self._peers.values() if one.home == peer.number]:
            self._lost(guest, f"the memory that it shared with {peer.host} is gone")
        if not peer.ready:  # it had not begun anything
            return
        for child in living:
            self._away[str(child.part)] = time.monotonic()
            self._mark(child.part, -1)
            if child.part.kind == "server":
                self.board.server_port[child.part.index] = 0
            child.begins = False
            self._died(child, -9, lost=f"its node {peer.host} is gone: {why}")

    def _look_for_the_missing(self) -> None:
        """Whoever is away for too long is not waited for: its work is done on another node, or not at all."""
        now = time.monotonic()
        if not self._away:
            if not self._complete:
                self._complete = True
                self.tell("say", f"all {len(self.children)} roles have joined")
            return
        if self.board.run[STOP] != RUNNING:
            for name in list(self._away):
                child = self._child(name)
                needed = child is not None and child.part.kind == "server" and self.board.run[STOP] != FAILED
                if child is not None and not child.done and not needed:
                    self._away.pop(name)
                    self._finished(child)
        if not self._complete:
            if now - self._began > self._join:
                names = ", ".join(self._away)
                self.outcome.error = RunError(f"{names} did not join within {self._join:g} s; --join allows more")
                self.stop("", FAILED)
            return
        for name, since in list(self._away.items()):
            child = self._child(name)
            if child is not None and now - since > self.plan.patience and self._must_be_played(child.part):
                self._move(child)

    def _must_be_played(self, part: Part) -> bool:
        held = self.plan.exact or self.plan.quorum == "hold"
        return part.kind == "server" or (part.kind == "worker" and held)

    def _move(self, child: Child) -> None:
        """A role whose node does not come back goes to the node that has the fewest."""
        name = str(child.part)
        ready = [peer for peer in self._peers.values() if peer.ready]
        least = min(ready, key=lambda peer: len(peer.parts), default=None)
        self._away.pop(name)
        if least is not None and len(least.parts) < len(self._here):
            least.parts.append(child.part)
            self.tell("warn", f"{name} goes on at {least.host}: nobody else has come for it")
        else:
            self._here.add(name)
            self.tell("warn", f"{name} goes on at the hub's own node: nobody else has come for it")
        self._restore_absent(child.part)
        self._start(child)

    def _end_others(self) -> None:
        """Roles of other nodes that are still there are ended now."""
        for peer in self._peers.values():
            for part in peer.parts:
                child = self._child(str(part))
                if child is not None and not child.done:
                    child.done = True
                    with contextlib.suppress(Closed, ProtocolError):
                        peer.channel.send_json(talk.KILL, {"part": str(part)})
        for name in self._away:
            if (child := self._child(name)) is not None:
                child.done = True

    def _farewell(self) -> None:
        """The run is over: let every agent go."""
        failed = self.outcome.error is not None
        told = {"over": True, "code": 1 if failed else 0, "text": str(self.outcome.error) if failed else ""}
        for peer in self._peers.values():
            with contextlib.suppress(Closed, ProtocolError):
                peer.channel.send_json(talk.BYE, told)
                peer.channel.flush(5.0)
        for peer in self._peers.values():
            peer.channel.part(LAST)  # not sooner: what it says meanwhile must not cost it our last word
            peer.channel.close()
            if peer.bulk is not None:
                peer.bulk.channel.close()
        for channel in self._newcomers:
            channel.close()
        self._gate.close()
        if self._doorstep is not None:
            self._doorstep.close()
        (self.directory.path / SHARED).unlink(missing_ok=True)
