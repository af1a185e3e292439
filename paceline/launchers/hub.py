"""The launcher of a run on several nodes: that of the node with the chief. The roles of other nodes are started and
watched by their agents; what becomes of them is decided here, as for those of this node.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paceline.board import FAILED, RUNNING, STOP
from paceline.errors import RunError
from paceline.launchers import talk
from paceline.launchers.beside import Doorstep
from paceline.launchers.local import Launcher
from paceline.launchers.peers import Peer, Peers
from paceline.launchers.quarters import SHARED
from paceline.launchers.recovery import Child
from paceline.net.channel import Channel, Closed, ProtocolError
from paceline.net.gate import Gate, listener
from paceline.plan import Plan
from paceline.role import Part, places, ranks
from paceline.scheme import Scheme
from paceline.stage import Node

# what a connection may bring that ends it: the last three by words of another shape than agents send
FAULTS = (Closed, ProtocolError, KeyError, TypeError, ValueError)
LAST = 2.0  # seconds that an agent may take to go after the goodbye


class Hub(Peers):
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
        self._registered: dict[int, int] = {}
        self._away: dict[str, float] = {}  # roles that nobody plays, and since when
        self._began = time.monotonic()
        self._complete = False
        self.at_end: Callable[[], None] = lambda: None  # done when nobody can join any more
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
            except FAULTS as error:
                self._lost(peer, str(error))
        for peer in list(self._peers.values()):
            try:
                self._tell_peer(peer)
            except FAULTS as error:
                self._lost(peer, str(error))
        self._look_for_the_missing()
        self._watch_descriptors()

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

    def _asked_to_end(self, parts: str) -> None:
        """Somebody wants a process of another node to end: its roles must not vanish before the last checkpoint."""
        self.tell("say", f"{parts} was asked to end; ending the run in order")
        self.stop(f"{parts} was asked to end")

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
        if not self._complete and not self._away.keys() - {"evaluator"}:  # nobody waits for that one
            self._complete = True
            self.tell("say", f"all {len(self.children) - len(self._away)} roles have joined")
        if self.board.run[STOP] != RUNNING:
            for name in list(self._away):
                child = self._child(name)
                assert child is not None
                if self.board.run[STOP] != FAILED and child.part.kind == "evaluator":
                    self._move(child)  # the last checkpoint at least is evaluated
                elif self.board.run[STOP] == FAILED or child.part.kind != "server":
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
            if child is not None and self._must_be_played(child.part):
                if child.part.kind != "evaluator":
                    self.board.put("alarm", self.board.get("alarm") + 1)  # others wait for it
                if now - since > self.plan.patience:
                    self._move(child)

    def _must_be_played(self, part: Part) -> bool:
        held = self.plan.exact or self.plan.quorum == "hold"
        return part.kind in ("server", "evaluator") or (part.kind == "worker" and held)

    def _move(self, child: Child) -> None:
        """A role whose node does not come back goes to the node that has the fewest."""
        name = str(child.part)
        ready = [peer for peer in self._peers.values() if peer.ready]
        least = min(ready, key=lambda peer: len(peer.parts), default=None)
        self._away.pop(name)
        if least is not None and len(least.parts) < len(self._here) and child.part.kind != "evaluator":
            least.parts.append(child.part)
            self.tell("warn", f"{name} goes on at {least.host}: nobody else has come for it")
        else:
            self._here.add(name)
            kind = "say" if name == "evaluator" else "warn"
            self.tell(kind, f"{name} goes on at the hub's own node: nobody else has come for it")
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
        self._leave_behind()
        (self.directory.path / SHARED).unlink(missing_ok=True)
        self.at_end()

    def _leave_behind(self) -> None:
        for peer in self._peers.values():
            peer.channel.close()
            if peer.bulk is not None:
                peer.bulk.channel.close()
        for channel in self._newcomers:
            channel.close()
        self._gate.close()
        if self._doorstep is not None:
            self._doorstep.close()
