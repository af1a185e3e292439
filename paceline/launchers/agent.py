"""The launcher of a node that has not got the chief: it starts and watches roles as the hub tells it, and keeps its
node's memory and the hub's alike. Without the hub it does nothing: cut off for longer than patience, it ends.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline import role
from paceline.board import Bells, Board
from paceline.control import Listener
from paceline.errors import PacelineError, RunError
from paceline.launchers import talk
from paceline.launchers.beside import Doorstep, taken
from paceline.launchers.local import LOOK, drain, is_stopped
from paceline.launchers.process import forked
from paceline.launchers.program import become, part_of
from paceline.launchers.way import NothingToDo, Way, channel_of, welcomed
from paceline.memory import HEAD, WORD, Segment, anonymous
from paceline.mirror import Mirror
from paceline.net.channel import Channel, Closed, ProtocolError, plain
from paceline.plan import Plan
from paceline.role import Part, Props, ranks
from paceline.run import ready_task
from paceline.snapshots import KEEP, own_names
from paceline.stage import Stage

SHARED = ".run"  # a file in the run directory by which a node knows that it sees the hub's
RETURNED = ("logs", "order", "summaries", "best")  # folders that the hub gets at the end


@dataclass
class Started:
    """One role of this node and the process that plays it now."""

    part: Part
    pid: int
    listener: Listener
    frozen: float = 0.0


class Agent:
    """One life in one run: from the welcome until the hub says goodbye, or is gone."""

    def __init__(
        self,
        way: Way,
        control: Channel,
        welcome: dict[str, Any],
        nonce: str,
        log: Callable[[str], None],
        objects: dict[str, Any],
    ) -> None:
        self._way, self._control, self._say, self._objects = way, control, log, objects
        self.plan = Plan.from_dict(welcome["plan"])
        self.node = replace(way.node, number=int(welcome["node"]))
        if welcome["store"] is not None:
            host, port = welcome["store"]
            assert way.node.secret is not None
            self.node = replace(self.node, store=(str(host), int(port), way.node.secret))
        self._hub = str(welcome["nonce"])
        self._heard = time.monotonic()
        self._children: dict[str, Started] = {}
        self._bulk = talk.Bulk(self._second(nonce))
        self._temporary: Path | None = None
        self._settle_directory()
        self._take_memory(int(welcome["servers"]), int(welcome["beside"]))
        self.bells = Bells(self.board, self._bells, self.board.launcher)
        self._mirror = Mirror(self.board, int(welcome["clock"]) - time.monotonic_ns())
        saved = [self.board.number("saved", rank) for rank in range(self.plan.workers)]
        self._mirror.withheld = frozenset(saved)
        self._shipped = [0] * self.plan.workers
        self._stage: Stage | None = None
        self._segment: Segment | None = None
        self._selector = selectors.DefaultSelector()
        self._told = 0.0
        self._gone: dict[str, Any] | None = None
        self._ended: list[tuple[Part, int, int]] = []  # roles that have ended, to be told when their files have gone
        self._interrupted, self._asked = 0, False
        self._remote = set() if self._guest else set(range(self.board.roles)) - {self.board.launcher}

    def _take_memory(self, servers: int, beside: int) -> None:
        """Memory of this node's own, or that of another on this host."""
        assert self._way.node.secret is not None
        roles = self.plan.workers + servers + 2
        self._doorstep: Doorstep | None = None
        self._guest = False
        if beside >= 0 and self._shared:  # else checkpoints would have to come before the words that speak of them
            with contextlib.suppress(OSError, RunError):
                held = taken(self._hub, beside, self._way.node.secret, 2 + 2 * roles)
                self._guest = True
                self.node = replace(self.node, number=beside)
                self.board = Board(held[0], self.plan.workers, servers)
                self._state, self._bells = held[1], held[2:]
                return
        self.board = Board.create(self.plan.workers, servers)
        self._bells = Bells.create(self.board.roles)
        self._state = anonymous("paceline-state")
        if self.node.share:
            descriptors = [self.board.descriptor, self._state, *self._bells]
            self._doorstep = Doorstep(self._hub, self.node.number, self._way.node.secret, descriptors)

    def _second(self, nonce: str) -> Channel:
        channel = channel_of(self._way)
        channel.send_json(talk.BULK, {"node": int(self.node.number), "nonce": nonce})
        return channel

    def _settle_directory(self) -> None:
        """Use the hub's run directory if it is seen from here, else one of this node's own."""
        theirs = Path(self.plan.directory)
        try:
            shared = (theirs / SHARED).read_text(encoding="ascii") == self._hub
        except (OSError, UnicodeDecodeError):
            shared = False
        if not shared:
            self._temporary = Path(tempfile.mkdtemp(prefix="paceline-"))
            self.plan = replace(self.plan, directory=str(self._temporary))
        for folder in ("logs", "checkpoints", f"order/{self.plan.launch:03d}"):
            (Path(self.plan.directory) / folder).mkdir(parents=True, exist_ok=True)
        self._shared = shared
        self._inbox = talk.Inbox(Path(self.plan.directory), ("checkpoints",), self._say)

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
            register(self._bells[2 * place], selectors.EVENT_READ)
            self.board.sleeping[place] = 1
        try:
            if not self.plan.script:
                self._objects = self._objects | {"ready": ready_task(self.plan, self._objects)}
            beside = self.node.number if self._guest else -1
            self._control.send_json(talk.READY, {"shared": self._shared, "beside": beside})
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
                self._tell_hub()
            return bool(self._gone.get("over"))
        except (Closed, ProtocolError) as error:
            if (gone := self._unread_goodbye()) is not None:
                return bool(gone.get("over"))
            self._say(f"lost the hub: {error}")
            return False
        except PacelineError as error:  # its task cannot be made here, for one
            told = {"kind": type(error).__name__, "where": str(self._way), "text": str(error), "notes": []}
            self._control.send_json(talk.SAID, {"part": self._way.parts[0], "message": {"error": told}})
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
            for descriptor in (*self._bells, self._state, self.board.descriptor):
                os.close(descriptor)
            if self._temporary is not None:
                shutil.rmtree(self._temporary, ignore_errors=True)

    def _unread_goodbye(self) -> dict[str, Any] | None:
        """The hub closes both connections after it: who was writing, or reading the second, has not heard it yet."""
        with contextlib.suppress(Closed, ProtocolError):
            while self._gone is None and (messages := _received(self._control)):
                self._gone = next((plain(payload) for kind, payload in messages if kind == talk.BYE), None)
        return self._gone

    @property
    def message(self) -> dict[str, Any]:
        return self._gone or {}

    def _signalled(self, number: int, _: object) -> None:
        self._interrupted += 1

    def _listen(self) -> None:
        for kind, payload in _received(self._control):
            self._heard = time.monotonic()
            match kind:
                case talk.BOARD:
                    self._take_words(payload)
                case talk.START:
                    self._start(part_of(plain(payload)["part"]))
                case talk.KILL:
                    self._kill(plain(payload)["part"])
                case talk.BYE:
                    self._gone = plain(payload)
                    return
        for kind, payload in _received(self._bulk.channel):
            self._heard = time.monotonic()
            match kind:
                case talk.LAYOUT:
                    self._lay_out(plain(payload))
                case talk.PIECES:
                    assert self._segment is not None
                    talk.write_piece(payload, self._segment, None)
                case talk.FILE:
                    self._inbox.take(payload)
                case talk.TAKEN:
                    if self._bulk.counted(payload):
                        self._bulk.answer()
        if time.monotonic() - self._heard > self.plan.patience:
            raise Closed(f"it has not been heard for {self.plan.patience:g} s")

    def _take_words(self, payload: bytearray) -> None:
        try:
            self._mirror.hear(payload)
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        if payload:
            self._notice()
            self._leave_bells_to_guests()
            for place in range(self.board.roles):
                if place not in self._remote:
                    self.bells.ring(place)

    def _notice(self) -> None:
        """Let the chief know what this node has heard of."""
        board, node, notice = self.board, self.node.number, self.board.get("notice")
        for rank in range(board.workers):
            if board.node[rank] == node:
                board.noticed[rank] = notice
        for shard in range(board.servers):
            if board.server_node[shard] == node:
                board.server_noticed[shard] = notice

    def _leave_bells_to_guests(self) -> None:
        """Roles of other agents that work on this node's memory hear their bells themselves."""
        board, node = self.board, self.node.number
        for place in list(self._remote):
            shard = place - board.workers
            if place < board.workers:
                here = board.node[place] == node
            else:
                here = 0 <= shard < board.servers and board.server_node[shard] == node
            if here:
                self._hear_no_more(place)
                board.sleeping[place] = 0

    def _hear_no_more(self, place: int) -> None:
        self._remote.discard(place)
        self._selector.unregister(self._bells[2 * place])

    def _lay_out(self, told: dict[str, Any]) -> None:
        text, size = told["text"].encode(), int(told["size"])
        if len(text) > HEAD - WORD or size < HEAD:
            raise ProtocolError("a layout that is too large")
        os.ftruncate(self._state, 0)
        os.ftruncate(self._state, size)
        self._segment = segment = Segment(self._state, size)
        segment.memory[WORD : WORD + len(text)] = text
        segment.words[0] = len(text)
        self.board.put("size", size)
        self._stage = Stage(
            self.plan, role.scheme_of(self.plan, self._objects), self.board, self.bells, self._state, self.node
        )
        self._stage.open()
        self._mirror.open(self._stage)

    def _start(self, part: Part) -> None:
        """Fork a role, as the hub has decided."""
        log = Path(self.plan.directory) / "logs" / f"{part.file}.log"
        props = Props(self.plan, self.board, self._bells, self._state, self._objects, node=self.node)

        def play(control: Any) -> int:
            self._selector.close()
            self._control.close()
            self._bulk.channel.close()
            if self._doorstep is not None:
                self._doorstep.close()
            return (become if self.plan.start == "exec" else role.main)(part, props, control)

        for place in role.places(part, self.plan):
            if place in self._remote:
                self._hear_no_more(place)
            self.board.sleeping[place] = 0
        pid, connection = forked(str(part), log, play)
        child = Started(part, pid, Listener(connection))
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
        self._bulk.give(talk.files(root, chosen))

    def _forward(self, child: Started) -> None:
        for message in child.listener.messages():
            self._control.send_json(talk.SAID, {"part": str(child.part), "message": message})

    def _watch_frozen(self) -> None:
        now = time.monotonic()
        for child in self._children.values():
            if not is_stopped(child.pid):
                child.frozen = 0.0
                continue
            child.frozen = child.frozen or now
            self._control.send_json(talk.FROZEN, {"part": str(child.part)})
            if now - child.frozen > self.plan.patience:
                os.kill(child.pid, signal.SIGKILL)
                child.frozen = 0.0

    def _tell_hub(self) -> None:
        """Parts of snapshots first, then the words, then who has ended: in that order they happened."""
        if not self._guest:  # who has the memory tells what is in it
            self._ship_parts()
        self._bulk.feed()
        stage, mine = self._stage, None
        if stage is not None:
            servers = bool(stage.scheme.methods)
            mine = [stage.near(0)] if servers else [stage.beside(rank) for rank in range(self.plan.workers)]
        news = b"" if self._guest else self._mirror.news(mine)
        now = time.monotonic()
        if news or now - self._told >= LOOK:
            self._told = now
            self._control.send(talk.BOARD, news)
        if self._interrupted and not self._asked:  # its roles must not vanish before the last checkpoint
            self._asked = True
            self._control.send_json(talk.FROZEN, {"leaves": str(self._way)})
        if self._interrupted > 1:
            raise KeyboardInterrupt
        if self._ended and not self._bulk.busy:
            for part, code, memory in self._ended:
                self._control.send_json(talk.DIED, {"part": str(part), "code": code, "memory": memory})
            self._ended.clear()
        self._control.flush()

    def _ship_parts(self) -> None:
        """What this node's workers have put aside for a checkpoint goes to the hub before the word that says so."""
        board, stage = self.board, self._stage
        for rank in range(self.plan.workers):
            number = board.saved[rank]
            if number == self._shipped[rank] or stage is None or not stage.beside(rank) or self._bulk.busy:
                continue
            parts = []
            for name in own_names(stage, rank):
                (offset, size), *_ = stage.spans([KEEP + name])
                parts.append((offset, memoryview(bytes(stage.segment.memory[offset : offset + size]))))
            if board.saved[rank] != number:
                return  # overtaken by the next while it was copied: once more
            self._shipped[rank] = number
            pairs = talk.pair(board.number("saved", rank), number)
            self._bulk.give(talk.pieces(parts), talk.after(pairs))

    def _end_all(self) -> None:
        for child in self._children.values():
            os.kill(child.pid, signal.SIGKILL)
        for child in self._children.values():
            os.wait4(child.pid, 0)
            child.listener.connection.close()
        self._children.clear()


def serve(
    find: Callable[[], Way | None],
    limit: float,
    log: Callable[[str], None],
    objects: dict[str, Any] | None = None,
) -> int:
    """Take part until the run is over; gives the exit code. Whoever is cut off from the hub stops its roles at once,
    and joins again if the hub is back within patience. `find`: where it is, as far as that is known; `objects`: task,
    scheme and hooks that have no name, which every node must bring itself."""
    first = True
    while True:
        nonce = os.urandom(16).hex()
        try:
            way, control, welcome = welcomed(find, limit, nonce, first, log)
        except NothingToDo as reason:
            log(str(reason))
            return 0
        log(f"{way}: joined the run at {way.host}:{way.port}")
        agent = Agent(way, control, welcome, nonce, log, objects or {})
        if agent.run():
            told = agent.message
            log(str(told.get("text") or "the run is over"))
            return int(told.get("code", 0))
        limit, first = agent.plan.patience, False


def _received(channel: Channel) -> list[tuple[int, bytearray]]:
    return channel.receive()


def _empty(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(descriptor, 4096)
