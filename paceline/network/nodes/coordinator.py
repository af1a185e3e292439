"""The coordinator of a run on several nodes: it runs on the node of the chief. Agents start and watch the roles of the
other nodes; the coordinator decides about these roles as the supervisor decides about those of its own node.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paceline.config.endpoint import Endpoint
from paceline.config.plan import Plan
from paceline.errors import RunError, UsageError
from paceline.network.nodes.join import JoinWait, Verdict
from paceline.network.nodes.peers import FAULTS, Peer, PeerConnections, Refusal
from paceline.network.nodes.protocol import NodeMessage
from paceline.network.nodes.routes import Routes
from paceline.network.secure.channel import Closed
from paceline.processes.memory.board import FAILED, RUNNING, STOP
from paceline.processes.roles.roles import Role, places, ranks
from paceline.processes.supervisor.children import Child
from paceline.processes.supervisor.supervisor import Elsewhere, Supervisor
from paceline.scheme import Scheme
from paceline.signals import EXIT_CODE

TOGETHER = 5.0  # seconds that an agent which was asked to leave stays: engines may be signalling the chief as well


def refuse_open_means(collective: str, encrypted: bool) -> None:
    """A run with encrypted connections must not take its means over open ones."""
    if encrypted and collective in ("gloo", "nccl"):
        raise UsageError(
            f"--collective {collective} takes means over connections of its own, which TLS does not cover; "
            "use --collective tcp (the default on several nodes), or omit --tls on a network that you trust"
        )


class Coordinator(Elsewhere):
    """Runs a plan whose roles are on several nodes: its supervisor those of this node (`here`), agents the others."""

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
            plan = replace(plan, collective="tcp")  # means in shared memory cannot span nodes
        if plan.collective != "tcp":
            tell(
                "warn",
                f"means go over connections of {plan.collective}, which are neither authenticated nor encrypted: "
                "any host that can reach the workers' ports can read and change them; --collective tcp protects them",
            )
        self.supervisor = supervisor = Supervisor(plan, scheme, objects, tell=tell, watch=watch, node=node)
        supervisor.elsewhere = self
        self._board, self._outcome, self._tell = supervisor.board, supervisor.outcome, tell
        self._here = here
        selector = supervisor.processes.selector
        self._peers = PeerConnections(supervisor.launched, supervisor.directory, selector, port, tell)
        self._away: dict[str, float] = {}  # roles without a process, and since when
        began = time.monotonic()
        names = [str(child.part) for child in supervisor.children]
        self._gathering = JoinWait(names, here, join=join, policy=join_policy, began=began)
        self._complete = False  # every role has joined, or the run continues without those that have not
        self._unfilled: list[str] = []  # roles without a process when the run ended
        self._routes = Routes(self._board, plan.patience, supervisor.warn, self._worker_and_host)
        self._given_up: set[str] = set()  # roles that were killed because they do not reach a server
        self.at_end: Callable[[], None] = lambda: None  # called when no agent can join any more
        for child in supervisor.children:
            remote = str(child.part) not in here
            if remote:
                self._away[str(child.part)] = began
                self._mark(child.part, -1)
            self._set_remote(child.part, remote)
        self._board.put("joined", 0)
        listening(node.address, self._peers.port)

    def _mark(self, part: Role, node: int) -> None:
        """Write on the board on which node a role is."""
        for rank in ranks(part, self.supervisor.plan):
            self._board.node[rank] = node
        if part.kind == "server":
            self._board.server_node[part.index] = node

    def _set_remote(self, part: Role, remote: bool) -> None:
        for place in places(part, self.supervisor.plan):
            self._peers.remote.set(place, remote)

    def _child(self, name: str) -> Child | None:
        return next((child for child in self.supervisor.children if str(child.part) == name), None)

    def _absent(self) -> list[Child]:
        """The roles without a process."""
        return [child for child in self.supervisor.children if str(child.part) in self._away]

    # what the supervisor calls: see Elsewhere

    def start(self, child: Child) -> bool:
        part, name = child.part, str(child.part)
        if name in self._here:
            self._set_remote(part, False)
            self._mark(part, 0)
            return False
        peer = self._peers.of(part)
        if peer is None or not peer.ready:
            self._away.setdefault(name, time.monotonic())
            return True
        self._away.pop(name, None)
        self._gathering.came.add(name)
        home = self._peers.get(peer.number if peer.home is None else peer.home)
        self._mark(part, home.number if home is not None else 0)
        self._set_remote(part, home is not None)
        if home is not None and home.laid_out and part not in home.filled:
            self._peers.fill(home, part)  # once: afterwards the state over there is newer than the one here
        if part not in peer.starts:
            peer.starts.append(part)
        return True

    def attend(self) -> None:
        self._peers.remote.drain()
        self._peers.admit(self._choose)
        for act in (self._receive, self._peers.send_news):
            for peer in self._peers:
                try:
                    act(peer)
                except FAULTS as error:
                    self._lost(peer, str(error))
        self._let_leave()
        self._look_for_the_missing()
        self._watch_routes()
        self._peers.watch_descriptors()

    def kill_all(self) -> None:
        for peer in self._peers:
            for part in peer.parts:
                child = self._child(str(part))
                if child is not None and not child.done:
                    self._peers.say(peer, NodeMessage.KILL, {"part": str(part)})

    def release(self) -> None:
        """The run is over: warn of roles that never came, and let every agent go."""
        if self._complete:
            for name in self._gathering.never_came():
                self.supervisor.warn(f"{name} never joined")
            for name in self._unfilled:
                if name in self._gathering.came:
                    self.supervisor.warn(f"{name} did not come back before the end")
        told: dict[str, Any] = {"over": True, "code": 0}
        if self._outcome.error is not None:
            told |= {"code": 1, "text": str(self._outcome.error)}
        elif self._outcome.interrupted:
            told |= {"code": EXIT_CODE, "text": "the run was interrupted"}
        self._peers.release(told)
        self.at_end()

    def close(self) -> None:
        self._peers.close()

    # agents that come, and what they say

    def _choose(self, names: list[str]) -> list[str] | Refusal:
        """Which of the roles that an agent asks for it gets."""
        idle = [name for name in names if name.startswith("server:") and not self._board.servers]
        done = [name for name in names if (child := self._child(name)) is not None and child.done]
        done += [name for name in names if name == "evaluator" and name in self._here]  # this node evaluates itself
        names = [name for name in names if name not in (*idle, *done)]
        refusals = [why for name in names if (why := self._objection(name))]
        # perhaps its process has just died, and that is not known yet
        taken = [name for name in names if (other := self._child(name)) and self._peers.of(other.part)]
        if refusals:
            return Refusal("; ".join(refusals), again=len(refusals) == len(taken))
        if not names and done:
            return Refusal(f"{', '.join(done)} has nothing to do any more", idle=True)
        if not names:
            scheme = self.supervisor.launched.scheme.name
            return Refusal(f"{scheme} needs no server: {', '.join(idle)} has nothing to do", idle=True)
        return names

    def _objection(self, name: str) -> str:
        """Why no agent may have a role, if so."""
        child, children = self._child(name), self.supervisor.children
        if child is None and name == "evaluator":
            children.append(Child(Role("evaluator")))  # one that is not in the cluster may join whenever it starts
            self._peers.remote.set(self._board.evaluator, True)
            return ""
        if child is None:
            return f"this run has no {name}; it has: {', '.join(str(one.part) for one in children)}"
        if name in self._here:
            return f"{name} is played on the hub's own node"
        other = self._peers.of(child.part)
        return f"{name} is played already, by a process on {other.host}" if other is not None else ""

    def _receive(self, peer: Peer) -> None:
        for kind, told in self._peers.received(peer):
            match kind:
                case NodeMessage.READY:
                    self._ready(peer, told)
                case NodeMessage.SAID:
                    if (child := self._child(told["part"])) is not None:
                        self.supervisor.heard(child, told["message"])
                case NodeMessage.DIED:
                    self._died_there(peer, told)
                case NodeMessage.LEAVES:
                    self._asked_to_leave(peer)

    def _ready(self, peer: Peer, told: dict[str, Any]) -> None:
        peer.ready, peer.shared, home = True, bool(told["shared"]), int(told["beside"])
        if home >= 0:
            if home and self._peers.get(home) is None:
                raise Closed("the node whose memory it shares is gone")
            peer.home = home
        for part in peer.parts:
            child = self._child(str(part))
            assert child is not None
            if self._complete:
                self._tell("say", f"{part} is here, on {peer.host}")
                self.supervisor.recovery.restore_absent(part)
            self.supervisor.start(child)

    def _asked_to_leave(self, peer: Peer) -> None:
        """A signal has asked an agent to end. Only a signal to the chief ends the run. An engine that ends a run sends
        one to all tasks, so the agent stays until a signal to the chief would have been seen."""
        if not peer.leaving:
            peer.leaving = time.monotonic()
            peer.saves = self._complete and any(self.supervisor.recovery.holds_state(part) for part in peer.parts)
            if peer.saves:  # that state is lost with it
                self._board.put("asked", self._board.get("asked") + 1)

    def _let_leave(self) -> None:
        """Let the agents leave that were asked to, unless the run ends: then they end with it, in order."""
        for peer in [one for one in self._peers if one.leaving]:
            waited = time.monotonic() - peer.leaving
            saving = peer.saves and self._board.get("written") < peer.leaving * 1e9
            kept = saving and waited < self.supervisor.plan.patience
            if self._board.run[STOP] == RUNNING and waited > TOGETHER and not kept:
                self._peers.say(peer, NodeMessage.BYE, {"over": True, "left": True})
                self._lost(peer, "it was asked to leave", excused=True)

    def _process_of(self, rank: int) -> tuple[Role, Peer | None]:
        """The process of a worker, and its node; None: this one."""
        part = next(child.part for child in self.supervisor.children if rank in ranks(child.part, self.supervisor.plan))
        return part, self._peers.of(part)

    def _worker_and_host(self, rank: int) -> str:
        part, peer = self._process_of(rank)
        return f"{part} on {peer.host}" if peer is not None else f"{part} on the hub's own node"

    def _watch_routes(self) -> None:
        """Restart a worker that cannot reach its server. Until it can, the run continues without it: a worker joins
        only when it has reached all servers. The chief is not restarted: no other role writes checkpoints."""
        if self._board.run[STOP] != RUNNING:
            return
        for rank in self._routes.look():
            part, peer = self._process_of(rank)
            if part.kind != "worker" or peer is None or str(part) in self._given_up:
                continue
            name, limit = self._worker_and_host(rank), f"{self.supervisor.plan.patience:g} s"
            self.supervisor.warn(f"{name} has not reached its server for {limit}: continuing without it until it can")
            self._given_up.add(str(part))
            self._peers.say(peer, NodeMessage.KILL, {"part": str(part)})

    def _died_there(self, peer: Peer, told: dict[str, Any]) -> None:
        child = self._child(told["part"])
        if child is None or child.part not in peer.parts:
            return
        code, excused = int(told["code"]), told["part"] in self._given_up
        if code:
            self._given_up.discard(told["part"])
        self.supervisor.ended(child, code, int(told["memory"]), excused=excused)

    def _lost(self, peer: Peer, why: str, *, excused: bool = False) -> None:
        """A node is gone, and its memory with it. `excused`: it was asked to leave."""
        if not self._peers.drop(peer):
            return
        living = [child for part in peer.parts if (child := self._child(str(part))) and not child.done]
        for guest in [one for one in self._peers if one.home == peer.number]:
            self._lost(guest, f"the memory that it shared with {peer.host} is gone", excused=excused)
        if not peer.ready:  # it had not started any role
            return
        if self._outcome.interrupted and any(child.part.kind == "server" for child in living):
            self.supervisor.end_all()  # the server's state is gone: the newest checkpoint is the last
            return
        for child in living:
            self._away[str(child.part)] = time.monotonic()
            self._mark(child.part, -1)
            if child.part.kind == "server":
                self._board.server_port[child.part.index] = 0
            if not self._complete:  # no step has been made yet: there is nothing to recover
                self._tell("warn", f"{child.part}: its node {peer.host} is gone: {why}")
                continue
            self.supervisor.died(child, -9, lost=f"its node {peer.host} is gone: {why}", excused=excused)

    def _look_for_the_missing(self) -> None:
        """Do not wait for ever for roles without a process: another node takes them, or the run continues without."""
        now, stop = time.monotonic(), self._board.run[STOP]
        if stop != RUNNING:
            for child in self._absent():
                if stop != FAILED and child.part.kind == "evaluator":
                    self._move(child)  # it evaluates at least the last checkpoint
                elif stop == FAILED or child.part.kind != "server":
                    del self._away[str(child.part)]
                    self._unfilled.append(str(child.part))
                    self.supervisor.finished(child)
            if not self._complete and self._outcome.interrupted:
                self.supervisor.end_all()  # no step has been made: there is nothing to save
                return
        if not self._complete:
            self._gather(now)
            return
        for child in self._absent():
            if self._must_be_played(child.part):
                if child.part.kind != "evaluator":
                    self.supervisor.launched.raise_alarm()  # others wait for it
                if now - self._away[str(child.part)] > self.supervisor.plan.patience:
                    self._move(child)

    def _gather(self, now: float) -> None:
        """Before the first step: wait for all roles as long as `--join` allows, then act by `--join-policy`."""
        if self._board.run[STOP] == FAILED:
            return
        missing = [child for child in self._absent() if child.part.kind != "evaluator"]
        limit = f"{self._gathering.join:g} s"
        match self._gathering.look(self._away, now, lambda text: self._tell("say", text)):
            case Verdict.COMPLETE:
                self._begin_all()
            case Verdict.WITHOUT:
                for child in missing:  # servers are started here; workers may join later
                    self.supervisor.warn(f"{child.part} did not join within {limit}: continuing without it")
                    if self._must_be_played(child.part):
                        self._move(child)
                    else:
                        self.supervisor.recovery.take_back_words(child.part, awaited=False)
                self._begin_all()
            case Verdict.FAIL:
                text = (
                    f"{', '.join(str(child.part) for child in missing)} did not join within {limit}; --join allows "
                    "more time, and --join-policy go-on trains without the missing roles"
                )
                self.supervisor.fail(RunError(text))

    def _begin_all(self) -> None:
        self._complete = True
        self._board.put("joined", 1)
        self.supervisor.wakeup.ring_all()

    def _must_be_played(self, part: Role) -> bool:
        held = self.supervisor.plan.exact or self.supervisor.plan.quorum == "hold"
        return (
            part.kind == "evaluator" or self.supervisor.recovery.holds_state(part) or (part.kind == "worker" and held)
        )

    def _move(self, child: Child) -> None:
        """Give a role whose node does not come back to the node that has the fewest roles."""
        name = str(child.part)
        ready = [peer for peer in self._peers if peer.ready]
        least = min(ready, key=lambda peer: len(peer.parts), default=None)
        self._away.pop(name)
        if least is not None and len(least.parts) < len(self._here) and child.part.kind != "evaluator":
            least.parts.append(child.part)
            self._tell("warn", f"{name} moves to {least.host}: no other process has come for it")
        else:
            self._here.add(name)
            kind = "say" if name == "evaluator" else "warn"
            self._tell(kind, f"{name} moves to the hub's own node: no other process has come for it")
        self.supervisor.recovery.restore_absent(child.part)
        self.supervisor.start(child)
