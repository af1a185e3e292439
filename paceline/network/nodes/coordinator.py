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

from paceline.config.endpoint import Endpoint
from paceline.config.plan import Plan
from paceline.errors import RunError, UsageError
from paceline.network.nodes import protocol
from paceline.network.nodes.join_wait import JoinWait, Verdict
from paceline.network.nodes.memory_handover import MemoryHandover
from paceline.network.nodes.node_memory import SHARED
from paceline.network.nodes.peers import Peer, PeerConnections
from paceline.network.nodes.routes import Routes
from paceline.network.secure import tls
from paceline.network.secure.admission import AdmissionListener, listener
from paceline.network.secure.channel import Channel, Closed, ProtocolError
from paceline.processes.memory.board import FAILED, RUNNING, STOP
from paceline.processes.roles.main import Role, places, ranks
from paceline.processes.supervisor.launcher import Supervisor
from paceline.processes.supervisor.recovery import Child
from paceline.scheme import Scheme
from paceline.signals import EXIT_CODE

# what a connection may bring that ends it: the last three by words of another shape than agents send
FAULTS = (Closed, ProtocolError, KeyError, TypeError, ValueError)
LAST = 2.0  # seconds that an agent may take to go after the goodbye
TOGETHER = 5.0  # seconds that an agent which was asked to leave stays: engines may be signalling the chief as well


def refuse_open_means(collective: str, encrypted: bool) -> None:
    """Who asks for encrypted connections must not get others for means."""
    if encrypted and collective in ("gloo", "nccl"):
        raise UsageError(
            f"--collective {collective} takes means over connections of its own, which TLS does not cover; "
            "use --collective tcp (the default on several nodes), or omit --tls on a network that you trust"
        )


class Coordinator(PeerConnections):
    """Runs a plan whose roles are on several nodes. `here`: the roles of this one."""

    def __init__(
        self,
        plan: Plan,
        scheme: Scheme,
        objects: dict[str, Any],
        *,
        node: Endpoint,
        port: int,
        here: set[str],
        join: float,
        join_policy: str,
        tell: Callable[[str, str], None],
        watch: Callable[[Supervisor], None],
        listening: Callable[[str, int], None],
    ) -> None:
        refuse_open_means(plan.collective, node.certificates is not None)
        if plan.collective == "shared":
            plan = replace(plan, collective="tcp")  # other nodes have memories of their own
        super().__init__(plan, scheme, objects, tell=tell, watch=watch)
        if plan.collective != "tcp":
            tell(
                "warn",
                f"means go over connections of {plan.collective}, which are neither authenticated nor encrypted: "
                "whoever can reach the workers' ports can read and change them; --collective tcp protects them",
            )
        self._node, self._here = node, here
        self._context = replace(self._context, node=node)
        self._nonce = os.urandom(16).hex()
        (self.directory.path / SHARED).write_text(self._nonce, encoding="ascii")
        self._peers: dict[int, Peer] = {}
        self._newcomers: dict[Channel, float] = {}
        self._registered: dict[int, int] = {}
        self._away: dict[str, float] = {}  # roles that nobody plays, and since when
        began = time.monotonic()
        names = [str(child.part) for child in self.children]
        self._gathering = JoinWait(names, here, join=join, policy=join_policy, began=began)
        self._complete = False  # everybody has joined, or the run goes on without those who have not
        self._unfilled: list[str] = []  # roles that nobody played when the run ended
        self._routes = Routes(self.board, plan.patience, self._warn, self._worker_and_host)
        self._given_up: set[str] = set()  # roles that were killed because they do not reach a server
        self.at_end: Callable[[], None] = lambda: None  # done when nobody can join any more
        self._count = 0
        assert node.secret is not None
        socket = listener(node.address, port or node.ports)
        self._gate = AdmissionListener(
            socket, node.secret, tls=tls.server_side(node), log=lambda text: tell("warn", text)
        )
        for child in self.children:
            if str(child.part) not in here:
                self._away[str(child.part)] = began
                self._mark(child.part, -1)
        self.board.put("joined", 0)
        self._remote: set[int] = set()
        for child in self.children:
            for place in places(child.part, plan):
                self._set_remote(place, str(child.part) not in here)
        self._doorstep: MemoryHandover | None = None
        if node.share:
            self._doorstep = MemoryHandover(
                self._nonce, 0, node.secret, [self.board.descriptor, self._state, *self._wakeup]
            )
        listening(node.address, socket.getsockname()[1])

    def _mark(self, part: Role, node: int) -> None:
        """Write down on which node a role is."""
        for rank in ranks(part, self.plan):
            self.board.node[rank] = node
        if part.kind == "server":
            self.board.server_node[part.index] = node

    def _set_remote(self, place: int, remote: bool) -> None:
        """Whether a bell is heard by this launcher, which tells other nodes, or by a role of this node."""
        end = self._wakeup[2 * place]
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
            self._gathering.came.add(name)
            home = self._peers.get(peer.number if peer.home is None else peer.home)
            self._mark(child.part, home.number if home is not None else 0)
            for place in places(child.part, self.plan):
                self._set_remote(place, home is not None)
            if home is not None and home.laid_out and child.part not in home.filled:
                self._fill(home, child.part)  # once: what its memory holds afterwards is newer than what is here
            child.begins = True  # once the other node has all that it needs
        else:
            self._away.setdefault(name, time.monotonic())

    def _peer_of(self, part: Role) -> Peer | None:
        return next((peer for peer in self._peers.values() if part in peer.parts), None)

    def _attend(self) -> None:
        for place in self._remote:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wakeup[2 * place], 4096)
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
        self._let_leave()
        self._look_for_the_missing()
        self._watch_routes()
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

    def _asked_to_leave(self, peer: Peer) -> None:
        """Somebody wants a process of another node to end. It leaves alone: only the chief's own signal ends the run.
        An engine that ends a run signals all its tasks at once; so this one stays until that would have shown."""
        if not peer.leaving:
            peer.leaving = time.monotonic()
            peer.saves = self._complete and any(part.kind == "server" for part in peer.parts)
            if peer.saves:  # what its server holds is lost with it
                self.board.put("asked", self.board.get("asked") + 1)

    def _let_leave(self) -> None:
        """Those who were asked to leave do, unless the run ends anyway: then they end with it, in order."""
        for peer in [one for one in self._peers.values() if one.leaving]:
            waited = time.monotonic() - peer.leaving
            kept = peer.saves and self.board.get("written") < peer.leaving * 1e9 and waited < self.plan.patience
            if self.board.run[STOP] == RUNNING and waited > TOGETHER and not kept:
                with contextlib.suppress(Closed, ProtocolError):
                    peer.channel.send_json(protocol.BYE, {"over": True, "left": True})
                self._lost(peer, "it was asked to leave", excused=True)

    def _worker_and_host(self, rank: int) -> str:
        part = next(child.part for child in self.children if rank in ranks(child.part, self.plan))
        peer = self._peer_of(part)
        return f"{part} on {peer.host}" if peer is not None else f"{part} on the hub's own node"

    def _watch_routes(self) -> None:
        """A worker that cannot reach its server is restarted, and is not counted before it can: a worker takes part
        only when it has met all servers. The chief is not: nobody else writes checkpoints."""
        if self.board.run[STOP] != RUNNING:
            return
        for rank in self._routes.look():
            name = self._worker_and_host(rank)
            part = next(child.part for child in self.children if rank in ranks(child.part, self.plan))
            peer = self._peer_of(part)
            if part.kind != "worker" or peer is None or str(part) in self._given_up:
                continue
            self._warn(
                f"{name} has not reached its server for {self.plan.patience:g} s: going on without it until it can"
            )
            self._given_up.add(str(part))
            with contextlib.suppress(Closed, ProtocolError):
                peer.channel.send_json(protocol.KILL, {"part": str(part)})

    def _died_there(self, peer: Peer, told: dict[str, Any]) -> None:
        child = self._child(told["part"])
        if child is None or child.part not in peer.parts:
            return
        self.outcome.peak_rss = max(self.outcome.peak_rss, int(told["memory"]))
        code = int(told["code"])
        if code == 0 or self._over:
            self._finished(child)
        else:
            excused = told["part"] in self._given_up
            self._given_up.discard(told["part"])
            self._died(child, code, excused=excused)

    def _lost(self, peer: Peer, why: str, *, excused: bool = False) -> None:
        """A node is gone, with all that it held. `excused`: it was asked to go."""
        if self._peers.pop(peer.number, None) is None:
            return
        for channel in [peer.channel, *([peer.bulk.channel] if peer.bulk is not None else [])]:
            self._forget_descriptor(channel)
            channel.close()
        living = [child for part in peer.parts if (child := self._child(str(part))) and not child.done]
        for guest in [one for one in self._peers.values() if one.home == peer.number]:
            self._lost(guest, f"the memory that it shared with {peer.host} is gone", excused=excused)
        if not peer.ready:  # it had not begun anything
            return
        if self.outcome.interrupted and any(child.part.kind == "server" for child in living):
            self._end_all()  # with the server's state gone, the newest checkpoint is all that is left to keep
            return
        for child in living:
            self._away[str(child.part)] = time.monotonic()
            self._mark(child.part, -1)
            if child.part.kind == "server":
                self.board.server_port[child.part.index] = 0
            child.begins = False
            if not self._complete:  # nobody has begun a step yet: there is nothing to mend
                self.tell("warn", f"{child.part}: its node {peer.host} is gone: {why}")
                continue
            self._died(child, -9, lost=f"its node {peer.host} is gone: {why}", excused=excused)

    def _look_for_the_missing(self) -> None:
        """Whoever is away for too long is not waited for: its work is done on another node, or not at all."""
        now, stop = time.monotonic(), self.board.run[STOP]
        if stop != RUNNING:
            for name in list(self._away):
                child = self._child(name)
                assert child is not None
                if stop != FAILED and child.part.kind == "evaluator":
                    self._move(child)  # the last checkpoint at least is evaluated
                elif stop == FAILED or child.part.kind != "server":
                    self._away.pop(name)
                    self._unfilled.append(name)
                    self._finished(child)
            if not self._complete and self.outcome.interrupted:
                self._end_all()  # nobody has made a step: there is nothing to end in order
                return
        if not self._complete:
            self._gather(now)
            return
        for name, since in list(self._away.items()):
            child = self._child(name)
            if child is not None and self._must_be_played(child.part):
                if child.part.kind != "evaluator":
                    self.board.put("alarm", self.board.get("alarm") + 1)  # others wait for it
                if now - since > self.plan.patience:
                    self._move(child)

    def _gather(self, now: float) -> None:
        """Before the first step: wait for everybody as long as `--join` allows, then do as `--join-policy` says."""
        if self.board.run[STOP] == FAILED:
            return
        match self._gathering.look(self._away, now, lambda text: self.tell("say", text)):
            case Verdict.COMPLETE:
                if not self._gathering.never_came():
                    self.tell("say", self._gathering.complete)
                self._begin_all()
            case Verdict.WITHOUT:
                self._begin_without([name for name in self._away if name != "evaluator"])
            case Verdict.FAIL:
                names = ", ".join(name for name in self._away if name != "evaluator")
                self.outcome.error = RunError(
                    f"{names} did not join within {self._gathering.join:g} s; --join allows more time, and "
                    "--join-policy go-on trains without those who are missing"
                )
                self.stop("", FAILED)

    def _begin_without(self, missing: list[str]) -> None:
        """The time to join has passed: servers are played here, workers do without until somebody comes for them."""
        for name in missing:
            child = self._child(name)
            assert child is not None
            self._warn(f"{name} did not join within {self._gathering.join:g} s: going on without it")
            if self._must_be_played(child.part):
                self._move(child)
            else:
                self._unmask(child, awaited=False)
        self._begin_all()

    def _begin_all(self) -> None:
        self._complete = True
        self.board.put("joined", 1)
        self.wakeup.ring_all()

    def _warn(self, text: str) -> None:
        """A warning that is also kept in the result."""
        self.outcome.warnings.append(text)
        self.tell("warn", text)

    def _must_be_played(self, part: Role) -> bool:
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
                        peer.channel.send_json(protocol.KILL, {"part": str(part)})
        for name in self._away:
            if (child := self._child(name)) is not None:
                child.done = True

    def _farewell(self) -> None:
        """The run is over: say who never came, and let every agent go."""
        if self._complete:
            for name in self._gathering.never_came():
                self._warn(f"{name} never joined")
            for name in self._unfilled:
                if name in self._gathering.came:
                    self._warn(f"{name} did not come back before the end")
        told: dict[str, Any] = {"over": True, "code": 0}
        if self.outcome.error is not None:
            told |= {"code": 1, "text": str(self.outcome.error)}
        elif self.outcome.interrupted:
            told |= {"code": EXIT_CODE, "text": "the run was interrupted"}
        for peer in self._peers.values():
            with contextlib.suppress(Closed, ProtocolError):
                peer.channel.send_json(protocol.BYE, told)
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
