"""What a node is made of beside the hub's: its memory, or a share in another's; its directory; its words kept alike."""

from __future__ import annotations

import contextlib
import os
import selectors
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config import from_plan
from paceline.config.plan import Plan
from paceline.errors import RunError
from paceline.network.nodes import protocol
from paceline.network.nodes.board_replication import BoardReplica
from paceline.network.nodes.join import JoinRequest, channel_of
from paceline.network.nodes.memory_handover import MemoryHandover, taken
from paceline.network.secure.channel import Channel, ProtocolError
from paceline.processes.memory.board import Board
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.memory.segment import HEAD, WORD, Segment, anonymous
from paceline.processes.memory.snapshot import KEEP, own_names
from paceline.processes.memory.wakeup import Wakeup

SHARED = ".run"  # a file in the run directory by which a node knows that it sees the hub's


class NodeMemory:
    """The place in which an agent starts roles."""

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
        self.plan = Plan.from_dict(welcome["plan"])
        self.node = replace(way.node, number=int(welcome["node"]))
        if welcome["store"] is not None:
            host, port = welcome["store"]
            assert way.node.secret is not None
            self.node = replace(self.node, store=(str(host), int(port), way.node.secret))
        self._hub = str(welcome["nonce"])
        self._bulk = protocol.Bulk(self._second(nonce))
        self._temporary: Path | None = None
        self._settle_directory()
        self._take_memory(int(welcome["servers"]), int(welcome["beside"]))
        self.wakeup = Wakeup(self.board, self._wakeup, self.board.launcher)
        self._mirror = BoardReplica(self.board, int(welcome["clock"]) - time.monotonic_ns())
        saved = [self.board.number("saved", rank) for rank in range(self.plan.workers)]
        self._mirror.withheld = frozenset(saved)
        self._shipped = [0] * self.plan.workers
        self._memory: RunMemory | None = None
        self._segment: Segment | None = None
        self._selector = selectors.DefaultSelector()
        self._remote = set() if self._guest else set(range(self.board.roles)) - {self.board.launcher}

    def _take_memory(self, servers: int, beside: int) -> None:
        """Memory of this node's own, or that of another on this host."""
        assert self._way.node.secret is not None
        roles = self.plan.workers + servers + 2
        self._doorstep: MemoryHandover | None = None
        self._guest = False
        if beside >= 0 and self._shared:  # else checkpoints would have to come before the words that speak of them
            with contextlib.suppress(OSError, RunError):
                held = taken(self._hub, beside, self._way.node.secret, 2 + 2 * roles)
                self._guest = True
                self.node = replace(self.node, number=beside)
                self.board = Board(held[0], self.plan.workers, servers)
                self._state, self._wakeup = held[1], held[2:]
                return
        self.board = Board.create(self.plan.workers, servers)
        self._wakeup = Wakeup.create(self.board.roles)
        self._state = anonymous("paceline-state")
        if self.node.share:
            descriptors = [self.board.descriptor, self._state, *self._wakeup]
            self._doorstep = MemoryHandover(self._hub, self.node.number, self._way.node.secret, descriptors)

    def _second(self, nonce: str) -> Channel:
        channel = channel_of(self._way)
        channel.send_json(protocol.BULK, {"node": self.node.number, "nonce": nonce})
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
        self._inbox = protocol.Inbox(Path(self.plan.directory), ("checkpoints",), self._say)

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
                    self.wakeup.ring(place)

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
        self._selector.unregister(self._wakeup[2 * place])

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
        self._memory = RunMemory(
            self.plan, from_plan.scheme_of(self.plan, self._objects), self.board, self.wakeup, self._state, self.node
        )
        self._memory.open()
        self._mirror.open(self._memory)

    def _ship_parts(self) -> None:
        """What this node's workers have put aside for a checkpoint goes to the hub before the word that says so."""
        board, memory = self.board, self._memory
        for rank in range(self.plan.workers):
            number = board.saved[rank]
            if number == self._shipped[rank] or memory is None or not memory.beside(rank) or self._bulk.busy:
                continue
            parts = []
            for name in own_names(memory, rank):
                (offset, size), *_ = memory.spans([KEEP + name])
                parts.append((offset, memoryview(bytes(memory.segment.memory[offset : offset + size]))))
            if board.saved[rank] != number:
                return  # overtaken by the next while it was copied: once more
            self._shipped[rank] = number
            pairs = protocol.pair(board.number("saved", rank), number)
            self._bulk.give(protocol.pieces(parts), protocol.after(pairs))
