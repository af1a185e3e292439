"""The agent of a node without the chief: it starts and watches roles as the coordinator tells it, and keeps the memory
of its node and that of the coordinator alike. Without connection to the coordinator for longer than patience, it ends
its roles, and itself if no coordinator comes back.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline import signals
from paceline.config.from_plan import forkable, ready_task
from paceline.config.role_names import parsed
from paceline.errors import PacelineError
from paceline.network.nodes import protocol
from paceline.network.nodes.board_replication import RemoteWakeups
from paceline.network.nodes.join import JoinRequest, NothingToDo, channel_of, rejoin_time, welcomed
from paceline.network.nodes.node_memory import NodeMemory
from paceline.network.nodes.protocol import NodeMessage
from paceline.network.secure.channel import Channel, Closed, ProtocolError, plain
from paceline.processes.memory.board import STOP
from paceline.processes.roles.main import RoleContext
from paceline.processes.roles.roles import Role, places
from paceline.processes.supervisor.children import Child, Children, Ended, Message
from paceline.processes.supervisor.patience import Patience
from paceline.processes.supervisor.supervisor import LOOK

RETURNED = ("logs", "order", "summaries", "best")  # folders that the coordinator gets at the end


class Agent:
    """One life in one run: from the welcome until the coordinator says goodbye, or is gone."""

    def __init__(
        self,
        way: JoinRequest,
        control: Channel,
        welcome: dict[str, Any],
        nonce: str,
        log: Callable[[str], None],
        objects: dict[str, Any],
    ) -> None:
        self._way, self._control, self._say, self._objects = way, control, log, objects
        self._bulk = protocol.Bulk(channel_of(way))
        self._bulk.channel.send_json(NodeMessage.BULK, {"node": int(welcome["node"]), "nonce": nonce})
        self._node = node = NodeMemory(way.node, welcome, log)
        self.patience = node.plan.patience
        self._children = Children()
        self._remote = RemoteWakeups(self._children.selector, node.board, node.pipes)
        self._heard = time.monotonic()
        self._told = 0.0
        self._gone: dict[str, Any] | None = None
        self._ended: list[Ended] = []  # roles that have ended, to be reported when their files have been sent
        self._signals: list[int] = []  # those that have asked this process to end
        self._asked = False  # the coordinator has been told of them
        self._ready = False
        self._patience = Patience(node.plan, node.board)

    def run(self) -> bool:
        """True: the run is over. False: the coordinator is gone, and so are this node's roles."""
        # engines send SIGUSR1 to all tasks for an end in order: the coordinator gets it too, and tells every agent
        handlers: dict[signal.Signals, signals.Handler] = {signal.SIGUSR1: signal.SIG_IGN}
        handlers |= dict.fromkeys((signal.SIGINT, signal.SIGTERM), self._signalled)
        with signals.handling(handlers), self._children.awake():
            try:
                return self._take_part()
            except (Closed, ProtocolError) as error:
                if (gone := self._unread_goodbye()) is not None:
                    return bool(gone.get("over"))
                if self._signals:  # it was asked to leave, so it does not wait for the coordinator
                    self._gone = {"over": True, "left": True}
                    return True
                self._say(f"lost the hub: {error}")
                return False
            except PacelineError as error:  # for example its task cannot be made here
                told = {"kind": type(error).__name__, "where": str(self._way), "text": str(error), "notes": []}
                self._control.send_json(NodeMessage.SAID, {"part": self._way.parts[0], "message": {"error": told}})
                self._control.flush(5.0)
                raise
            finally:
                self._children.kill_all(lambda *_: None)
                self._close_connections()
                self._node.close()

    def _take_part(self) -> bool:
        node, selector = self._node, self._children.selector
        selector.register(self._control, selectors.EVENT_READ)
        selector.register(self._bulk, selectors.EVENT_READ)
        if node.handover is not None:
            selector.register(node.handover, selectors.EVENT_READ)
        for place in range(node.board.roles):
            if not node.guest and place != node.board.launcher:
                self._remote.set(place, True)
        if not node.plan.script:
            ready = ready_task(node.plan, self._objects)
            self._objects = self._objects | {"ready": ready}
            node.plan = forkable(node.plan, ready, lambda _, text: self._say(text))
        self._ready = True
        beside = node.node.number if node.guest else -1
        self._control.send_json(NodeMessage.READY, {"shared": node.shared, "beside": beside})
        while self._gone is None:
            selector.modify(self._bulk, selectors.EVENT_READ | (selectors.EVENT_WRITE if self._bulk.pending else 0))
            self._children.select(LOOK)
            self._remote.drain()
            if node.handover is not None:
                node.handover.pump()
            self._listen()
            for ended in self._children.attend(self._forward):
                self._note_end(ended)
            self._watch()
            self._tell_coordinator()
        return bool(self._gone.get("over"))

    def _unread_goodbye(self) -> dict[str, Any] | None:
        """A BYE that is still unread: the coordinator closes both connections after it, and a send may fail first."""
        with contextlib.suppress(Closed, ProtocolError):
            while self._gone is None and (messages := self._control.receive()):
                self._gone = next((plain(payload) for kind, payload in messages if kind == NodeMessage.BYE), None)
        return self._gone

    @property
    def ending(self) -> tuple[int, str]:
        """The exit code and the last line. An agent that has left ends as if its signal had killed it: the engine then
        knows that the run may need another task in its place."""
        told = self._gone or {}
        if told.get("left") and self._signals:
            name = signal.Signals(self._signals[0]).name
            return 128 + self._signals[0], f"{self._way}: asked to leave ({name}); the run continues without it"
        return int(told.get("code", 0)), str(told.get("text") or "the run is over")

    def _signalled(self, number: int, _: object) -> None:
        self._signals.append(number)
        if not self._ready:  # it makes its task, which may take long, and runs no role yet
            raise SystemExit(128 + number)

    def _listen(self) -> None:
        node = self._node
        for kind, payload in self._control.receive():
            self._heard = time.monotonic()
            match kind:
                case NodeMessage.BOARD:
                    node.take_words(payload)
                    if payload:  # roles of other agents read their own wakeup pipes
                        for place in self._remote:
                            if node.has_role_of(place):
                                self._remote.set(place, False)
                        self._remote.ring_local(node.wakeup)
                case NodeMessage.START:
                    self._start(plain(payload)["part"])
                case NodeMessage.KILL:
                    name = plain(payload)["part"]
                    for child in [one for one in self._children.running if str(one.part) == name]:
                        self._children.kill(child)
                case NodeMessage.BYE:
                    self._gone = plain(payload)
                    return
        for kind, payload in self._bulk.channel.receive():
            self._heard = time.monotonic()
            match kind:
                case NodeMessage.LAYOUT:
                    node.lay_out(plain(payload), self._objects)
                case NodeMessage.PIECES:
                    assert node.memory is not None
                    protocol.write_piece(payload, node.memory.segment, None)
                case NodeMessage.FILE:
                    node.inbox.take(payload)
                case NodeMessage.TAKEN:
                    self._bulk.acknowledge(payload)
        if time.monotonic() - self._heard > self.patience:
            raise Closed(f"it has not been heard for {self.patience:g} s")

    def _start(self, name: str) -> None:
        """Fork a role, as the coordinator has decided."""
        node, part = self._node, Role(*parsed(name))
        for place in places(part, node.plan):
            self._remote.set(place, False)
        context = RoleContext(node.plan, node.board, node.pipes, node.state, self._objects, node=node.node)
        self._children.start(Child(part), context, self._close_connections)

    def _close_connections(self) -> None:
        self._control.close()
        self._bulk.channel.close()
        if self._node.handover is not None:
            self._node.handover.close()

    def _note_end(self, ended: Ended) -> None:
        self._ended.append(ended)
        if ended.code == 0 and not self._node.shared and not self._children.running:
            root = Path(self._node.plan.directory)
            chosen = [path for folder in RETURNED for path in sorted((root / folder).rglob("*")) if path.is_file()]
            self._bulk.give(protocol.files(root, chosen))

    def _forward(self, child: Child, message: Message) -> None:
        self._control.send_json(NodeMessage.SAID, {"part": str(child.part), "message": message})

    def _watch(self) -> None:
        """Kill roles that stay stopped or hang before their first step; the coordinator decides about their restart."""
        now = time.monotonic()
        if self._patience.preparing(self._children.running, now):
            self._control.send_json(NodeMessage.ALARM, {"part": "server"})
        for child, seconds in self._patience.stopped(self._children.running, now):
            self._control.send_json(NodeMessage.ALARM, {"part": str(child.part)})
            if seconds > self.patience:
                self._children.kill(child)
        if self._node.plan.script or self._node.board.run[STOP]:
            return
        for child in self._patience.stuck_at_start(self._children.running, now, self.patience):
            text = f"{child.part} hangs: no progress for {self.patience:g} s before its first step; killing it"
            self._forward(child, {"warn": text})
            self._children.kill(child)

    def _tell_coordinator(self) -> None:
        """Send in the order of events: parts of snapshots, then the words of the board, then roles that have ended."""
        self._node.ship_parts(self._bulk)
        self._bulk.feed()
        news, now = self._node.news(), time.monotonic()
        if news or now - self._told >= LOOK:
            self._told = now
            self._control.send(NodeMessage.BOARD, news)
        if self._signals and not self._asked:  # the coordinator says when: perhaps the whole run is about to end
            self._asked = True
            self._control.send_json(NodeMessage.LEAVES, {"parts": str(self._way)})
        if len(self._signals) > 1:
            raise KeyboardInterrupt
        if self._ended and not self._bulk.busy:
            for child, code, peak in self._ended:
                self._control.send_json(NodeMessage.DIED, {"part": str(child.part), "code": code, "memory": peak})
            self._ended.clear()
        self._control.flush()


def serve(
    find: Callable[[], JoinRequest | None],
    limit: float,
    log: Callable[[str], None],
    objects: dict[str, Any] | None = None,
) -> int:
    """Take part until the run is over; gives the exit code. An agent that loses the coordinator kills its roles, and
    joins again if the coordinator is back in time (`rejoin_time`). `limit`: seconds to wait for it at first; `find`:
    its address, once known; `objects`: task, scheme and hooks without a name, which every node must bring itself."""
    first, join = True, limit
    while True:
        nonce = os.urandom(16).hex()
        try:
            way, control, welcome = welcomed(find, limit, nonce, first, log)
        except NothingToDo as reason:
            log(str(reason))
            return 0
        log(f"{way}: joined the run at {way.host}:{way.port}")
        try:
            agent = Agent(way, control, welcome, nonce, log, objects or {})
        except (OSError, Closed) as error:  # the coordinator went before the second connection was made
            control.close()
            log(f"lost the hub: {error}")
            continue
        if agent.run():
            code, text = agent.ending
            log(text)
            return code
        limit, first = rejoin_time(agent.patience, join), False
        log(f"waiting up to {limit:g} s for the hub to come back")
