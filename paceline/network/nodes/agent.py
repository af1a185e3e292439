"""The launcher of a node that has not got the chief: it starts and watches roles as the hub tells it, and keeps its
node's memory and the hub's alike. Without the hub it does nothing: cut off for longer than patience, it ends its roles,
and itself if no hub comes back.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config.from_plan import forkable, ready_task
from paceline.errors import PacelineError
from paceline.network.nodes import protocol
from paceline.network.nodes.join import JoinRequest, NothingToDo, welcomed
from paceline.network.nodes.join_wait import rejoin_time
from paceline.network.nodes.node_memory import NodeMemory
from paceline.network.secure.channel import Channel, Closed, ProtocolError, plain
from paceline.processes.memory.board import STOP
from paceline.processes.roles import main
from paceline.processes.roles.control_channel import Listener
from paceline.processes.roles.main import Role, RoleContext, ranks
from paceline.processes.supervisor.cpu_activity import is_stopped
from paceline.processes.supervisor.exec_role import become, part_of
from paceline.processes.supervisor.fork import forked
from paceline.processes.supervisor.launcher import LOOK, drain
from paceline.processes.supervisor.patience import Patience
from paceline.processes.supervisor.recovery import progress_of

RETURNED = ("logs", "order", "summaries", "best")  # folders that the hub gets at the end


@dataclass
class Started:
    """One role of this node and the process that plays it now."""

    part: Role
    pid: int
    listener: Listener
    progress_at_start: int
    frozen: float = 0.0
    done: bool = False


class Agent(NodeMemory):
    """One life in one run: from the welcome until the hub says goodbye, or is gone."""

    def __init__(
        self,
        way: JoinRequest,
        control: Channel,
        welcome: dict[str, Any],
        nonce: str,
        log: Callable[[str], None],
        objects: dict[str, Any],
    ) -> None:
        super().__init__(way, control, welcome, nonce, log, objects)
        self._children: dict[str, Started] = {}
        self._heard = time.monotonic()
        self._told = 0.0
        self._gone: dict[str, Any] | None = None
        self._ended: list[tuple[Role, int, int]] = []  # roles that have ended, to be told when their files have gone
        self._signals: list[int] = []  # that have asked this process to end
        self._asked = False  # the hub has been told of them
        self._ready = False
        self._patience = Patience(self.plan, self.board)

    def run(self) -> bool:
        """True: the run is over. False: the hub is gone, and so are this node's roles."""
        woken, wake = socket.socketpair()
        woken.setblocking(False)
        wake.setblocking(False)
        handlers = {number: signal.signal(number, self._signalled) for number in (signal.SIGINT, signal.SIGTERM)}
        handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        # engines send this to all tasks for an end in order: the hub hears it too, and tells everybody
        handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        register = self._selector.register
        register(woken, selectors.EVENT_READ)
        register(self._control, selectors.EVENT_READ)
        register(self._bulk, selectors.EVENT_READ)
        if self._doorstep is not None:
            register(self._doorstep, selectors.EVENT_READ)
        for place in self._remote:
            register(self._wakeup[2 * place], selectors.EVENT_READ)
            self.board.sleeping[place] = 1
        try:
            if not self.plan.script:
                self._objects = self._objects | {"ready": ready_task(self.plan, self._objects)}
                self.plan = forkable(self.plan, lambda _, text: self._say(text))
            self._ready = True
            beside = self.node.number if self._guest else -1
            self._control.send_json(protocol.READY, {"shared": self._shared, "beside": beside})
            while self._gone is None:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._bulk.pending else 0)
                self._selector.modify(self._bulk, wanted)
                events = self._selector.select(LOOK)
                drain(woken)
                for key, _ in events:
                    if isinstance(key.fileobj, int):
                        _empty(key.fileobj)
                if self._doorstep is not None:
                    self._doorstep.pump()
                self._listen()
                self._reap()
                self._watch_frozen()
                self._watch_starting()
                self._tell_hub()
            return bool(self._gone.get("over"))
        except (Closed, ProtocolError) as error:
            if (gone := self._unread_goodbye()) is not None:
                return bool(gone.get("over"))
            if self._signals:  # whether the hub has let it go or is gone itself, it leaves
                self._gone = {"over": True, "left": True}
                return True
            self._say(f"lost the hub: {error}")
            return False
        except PacelineError as error:  # its task cannot be made here, for one
            told = {"kind": type(error).__name__, "where": str(self._way), "text": str(error), "notes": []}
            self._control.send_json(protocol.SAID, {"part": self._way.parts[0], "message": {"error": told}})
            self._control.flush(5.0)
            raise
        finally:
            self._end_all()
            signal.set_wakeup_fd(before)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self._selector.close()
            woken.close()
            wake.close()
            self._control.close()
            self._bulk.channel.close()
            if self._doorstep is not None:
                self._doorstep.close()
            for descriptor in (*self._wakeup, self._state, self.board.descriptor):
                os.close(descriptor)
            if self._temporary is not None:
                shutil.rmtree(self._temporary, ignore_errors=True)

    def _unread_goodbye(self) -> dict[str, Any] | None:
        """The hub closes both connections after it: who was writing, or reading the second, has not heard it yet."""
        with contextlib.suppress(Closed, ProtocolError):
            while self._gone is None and (messages := self._control.receive()):
                self._gone = next((plain(payload) for kind, payload in messages if kind == protocol.BYE), None)
        return self._gone

    @property
    def ending(self) -> tuple[int, str]:
        """The exit code and the last line. A task that has left by itself ends as one that its signal has killed:
        engines then know that the run may need another in its place."""
        told = self._gone or {}
        if told.get("left") and self._signals:
            name = signal.Signals(self._signals[0]).name
            return 128 + self._signals[0], f"{self._way}: asked to leave ({name}); the run goes on without it"
        return int(told.get("code", 0)), str(told.get("text") or "the run is over")

    def _signalled(self, number: int, _: object) -> None:
        self._signals.append(number)
        if not self._ready:  # it makes its task, perhaps for long, and plays no role yet
            raise SystemExit(128 + number)

    def _listen(self) -> None:
        for kind, payload in self._control.receive():
            self._heard = time.monotonic()
            match kind:
                case protocol.BOARD:
                    self._take_words(payload)
                case protocol.START:
                    self._start(part_of(plain(payload)["part"]))
                case protocol.KILL:
                    self._kill(plain(payload)["part"])
                case protocol.BYE:
                    self._gone = plain(payload)
                    return
        for kind, payload in self._bulk.channel.receive():
            self._heard = time.monotonic()
            match kind:
                case protocol.LAYOUT:
                    self._lay_out(plain(payload))
                case protocol.PIECES:
                    assert self._segment is not None
                    protocol.write_piece(payload, self._segment, None)
                case protocol.FILE:
                    self._inbox.take(payload)
                case protocol.TAKEN:
                    if self._bulk.counted(payload):
                        self._bulk.answer()
        if time.monotonic() - self._heard > self.plan.patience:
            raise Closed(f"it has not been heard for {self.plan.patience:g} s")

    def _start(self, part: Role) -> None:
        """Fork a role, as the hub has decided."""
        log = Path(self.plan.directory) / "logs" / f"{part.file}.log"
        context = RoleContext(self.plan, self.board, self._wakeup, self._state, self._objects, node=self.node)

        def play(control: Any) -> int:
            self._selector.close()
            self._control.close()
            self._bulk.channel.close()
            if self._doorstep is not None:
                self._doorstep.close()
            return (become if self.plan.start == "exec" else main.main)(part, context, control)

        for place in main.places(part, self.plan):
            if place in self._remote:
                self._hear_no_more(place)
            self.board.sleeping[place] = 0
        pid, connection = forked(str(part), log, play)
        child = Started(part, pid, Listener(connection), progress_of(part, self.plan, self.board))
        self._children[str(part)] = child
        self._selector.register(connection, selectors.EVENT_READ)
        board = self.board
        if part.kind == "server":
            board.server_pid[part.index] = pid
        elif part.kind == "evaluator":
            board.evaluator_words[2] = pid
        for rank in ranks(part, self.plan):
            board.pid[rank] = pid

    def _kill(self, name: str) -> None:
        if (child := self._children.get(name)) is not None:
            os.kill(child.pid, signal.SIGKILL)

    def _reap(self) -> None:
        for name, child in list(self._children.items()):
            pid, status, usage = os.wait4(child.pid, os.WNOHANG)
            self._forward(child)
            if not pid:
                continue
            self._selector.unregister(child.listener.connection)
            self._forward(child)
            child.listener.connection.close()
            del self._children[name]
            code = os.waitstatus_to_exitcode(status)
            self._ended.append((child.part, code, usage.ru_maxrss))
            if code == 0 and not self._shared and not self._children:
                self._return_files()

    def _return_files(self) -> None:
        root = Path(self.plan.directory)
        chosen = [path for folder in RETURNED for path in sorted((root / folder).rglob("*")) if path.is_file()]
        self._bulk.give(protocol.files(root, chosen))

    def _forward(self, child: Started) -> None:
        for message in child.listener.messages():
            self._control.send_json(protocol.SAID, {"part": str(child.part), "message": message})

    def _watch_frozen(self) -> None:
        now = time.monotonic()
        for child in self._children.values():
            if not is_stopped(child.pid):
                child.frozen = 0.0
                continue
            child.frozen = child.frozen or now
            self._control.send_json(protocol.FROZEN, {"part": str(child.part)})
            if now - child.frozen > self.plan.patience:
                os.kill(child.pid, signal.SIGKILL)
                child.frozen = 0.0

    def _watch_starting(self) -> None:
        """A role that hangs before its first step is killed; the hub decides what becomes of it."""
        if self.plan.script or self.board.run[STOP]:
            return
        patience = self.plan.patience
        for child in self._patience.stuck_at_start(self._children.values(), time.monotonic(), patience):
            text = f"{child.part} hangs: no progress for {patience:g} s before its first step; killing it"
            self._control.send_json(protocol.SAID, {"part": str(child.part), "message": {"warn": text}})
            os.kill(child.pid, signal.SIGKILL)

    def _tell_hub(self) -> None:
        """Parts of snapshots first, then the words, then who has ended: in that order they happened."""
        if not self._guest:  # who has the memory tells what is in it
            self._ship_parts()
        self._bulk.feed()
        memory, mine = self._memory, None
        if memory is not None:
            servers = bool(memory.scheme.methods)
            mine = [memory.near(0)] if servers else [memory.beside(rank) for rank in range(self.plan.workers)]
        news = b"" if self._guest else self._mirror.news(mine)
        now = time.monotonic()
        if news or now - self._told >= LOOK:
            self._told = now
            self._control.send(protocol.BOARD, news)
        if self._signals and not self._asked:  # the hub says when: perhaps the whole run is about to end
            self._asked = True
            self._control.send_json(protocol.LEAVES, {"parts": str(self._way)})
        if len(self._signals) > 1:
            raise KeyboardInterrupt
        if self._ended and not self._bulk.busy:
            for part, code, peak in self._ended:
                self._control.send_json(protocol.DIED, {"part": str(part), "code": code, "memory": peak})
            self._ended.clear()
        self._control.flush()

    def _end_all(self) -> None:
        for child in self._children.values():
            os.kill(child.pid, signal.SIGKILL)
        for child in self._children.values():
            os.wait4(child.pid, 0)
            child.listener.connection.close()
        self._children.clear()


def serve(
    find: Callable[[], JoinRequest | None],
    limit: float,
    log: Callable[[str], None],
    objects: dict[str, Any] | None = None,
) -> int:
    """Take part until the run is over; gives the exit code. Whoever is cut off from the hub stops its roles at once,
    and joins again if the hub is back in time (`rejoin_time`). `limit`: seconds to wait for the others at first;
    `find`: where the hub is, as far as that is known; `objects`: task, scheme and hooks that have no name, which every
    node must bring itself."""
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
        except (OSError, Closed) as error:  # the hub went before the second connection was made
            control.close()
            log(f"lost the hub: {error}")
            continue
        if agent.run():
            code, text = agent.ending
            log(text)
            return code
        limit, first = rejoin_time(agent.plan.patience, join), False
        log(f"waiting up to {limit:g} s for the hub to come back")


def _empty(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(descriptor, 4096)
