"""The memory and the run directory of a node without the chief: its own, or those of another node that it can see."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config import from_plan
from paceline.config.endpoint import Endpoint
from paceline.config.plan import Plan
from paceline.errors import RunError
from paceline.network.nodes import protocol
from paceline.network.nodes.board_replication import BoardReplica
from paceline.network.nodes.memory_handover import MemoryHandover, taken
from paceline.network.secure.channel import ProtocolError
from paceline.processes.memory.board import Board
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.memory.segment import HEAD, WORD, Segment, anonymous
from paceline.processes.memory.snapshot import KEEP, own_names
from paceline.processes.memory.wakeup import Wakeup

SHARED = ".run"  # a file in the run directory; a node that reads the coordinator's nonce in it shares the directory


class NodeMemory:
    """The board, wakeup pipes, state and directory of an agent's roles. `guest`: they are another agent's."""

    def __init__(self, node: Endpoint, welcome: dict[str, Any], log: Callable[[str], None]) -> None:
        assert node.secret is not None
        self.plan = Plan.from_dict(welcome["plan"])
        self.node = replace(node, number=int(welcome["node"]))
        if welcome["store"] is not None:
            host, port = welcome["store"]
            self.node = replace(self.node, store=(str(host), int(port), node.secret))
        self._run = str(welcome["nonce"])
        self._temporary: Path | None = None
        self.shared = self._settle_directory()  # the coordinator's directory is seen from here
        self.inbox = protocol.Inbox(Path(self.plan.directory), ("checkpoints",), log)
        self.guest = False
        self.handover: MemoryHandover | None = None
        self._take_memory(node.secret, int(welcome["servers"]), int(welcome["beside"]))
        self.wakeup = Wakeup(self.board, self.pipes, self.board.launcher)
        self.mirror = BoardReplica(self.board, int(welcome["clock"]) - time.monotonic_ns())
        self.mirror.withheld = frozenset(self.board.number("saved", rank) for rank in range(self.plan.workers))
        self._shipped = [0] * self.plan.workers
        self.memory: RunMemory | None = None  # once it is laid out

    def _take_memory(self, secret: bytes, servers: int, beside: int) -> None:
        """Use the memory of another node of this host, or make memory of this node's own."""
        roles = self.plan.workers + servers + 2
        if beside >= 0 and self.shared:  # else checkpoints would have to arrive before the words that announce them
            with contextlib.suppress(OSError, RunError):
                held = taken(self._run, beside, secret, 2 + 2 * roles)
                self.guest = True
                self.node = replace(self.node, number=beside)
                self.board = Board(held[0], self.plan.workers, servers)
                self.state, self.pipes = held[1], held[2:]
                return
        self.board = Board.create(self.plan.workers, servers)
        self.pipes = Wakeup.create(self.board.roles)
        self.state = anonymous("paceline-state")
        if self.node.share:
            self.handover = MemoryHandover(self._run, self.node.number, secret, self._descriptors)

    @property
    def _descriptors(self) -> list[int]:
        return [self.board.descriptor, self.state, *self.pipes]

    def _settle_directory(self) -> bool:
        """Use the coordinator's run directory if it is seen from here, else a temporary one."""
        try:
            shared = (Path(self.plan.directory) / SHARED).read_text(encoding="ascii") == self._run
        except (OSError, UnicodeDecodeError):
            shared = False
        if not shared:
            self._temporary = Path(tempfile.mkdtemp(prefix="paceline-"))
            self.plan = replace(self.plan, directory=str(self._temporary))
        for folder in ("logs", "checkpoints", f"order/{self.plan.launch:03d}"):
            (Path(self.plan.directory) / folder).mkdir(parents=True, exist_ok=True)
        return shared

    def take_words(self, payload: bytearray) -> None:
        """Write the coordinator's news on the board."""
        self.mirror.hear(payload)
        if not payload:
            return
        board, node, notice = self.board, self.node.number, self.board.get("notice")
        for rank in range(board.workers):  # the chief waits until every node has read its notice
            if board.node[rank] == node:
                board.noticed[rank] = notice
        for shard in range(board.servers):
            if board.server_node[shard] == node:
                board.server_noticed[shard] = notice

    def has_role_of(self, place: int) -> bool:
        """Whether the role of a wakeup pipe works on this node's memory."""
        board, shard = self.board, place - self.board.workers
        if place < board.workers:
            return bool(board.node[place] == self.node.number)
        return 0 <= shard < board.servers and bool(board.server_node[shard] == self.node.number)

    def news(self) -> bytes:
        """The words of the board that the coordinator has not got; those of a guest are sent by its host."""
        if self.guest:
            return b""
        memory, mine = self.memory, None
        if memory is not None:
            servers = bool(memory.scheme.methods)
            mine = [memory.near(0)] if servers else [memory.beside(rank) for rank in range(self.plan.workers)]
        return self.mirror.news(mine)

    def lay_out(self, told: dict[str, Any], objects: dict[str, Any]) -> None:
        """Lay out the state as on the coordinator's node."""
        text, size = told["text"].encode(), int(told["size"])
        if len(text) > HEAD - WORD or size < HEAD:
            raise ProtocolError("a layout that is too large")
        os.ftruncate(self.state, 0)
        os.ftruncate(self.state, size)
        segment = Segment(self.state, size)
        segment.memory[WORD : WORD + len(text)] = text
        segment.words[0] = len(text)
        self.board.put("size", size)
        scheme = from_plan.scheme_of(self.plan, objects)
        self.memory = RunMemory(self.plan, scheme, self.board, self.wakeup, self.state, self.node)
        self.memory.open()
        self.mirror.open(self.memory)

    def ship_parts(self, bulk: protocol.Bulk) -> None:
        """Send the parts of a snapshot that workers of this node have copied, then the word of the board about it."""
        board, memory = self.board, self.memory
        if self.guest or memory is None:
            return
        for rank in range(self.plan.workers):
            number = board.saved[rank]
            if number == self._shipped[rank] or not memory.beside(rank) or bulk.busy:
                continue
            parts = []
            for name in own_names(memory, rank):
                (offset, size), *_ = memory.spans([KEEP + name])
                parts.append((offset, memoryview(bytes(memory.segment.memory[offset : offset + size]))))
            if board.saved[rank] != number:
                return  # it has changed while it was copied: copy it again
            self._shipped[rank] = number
            bulk.give(protocol.pieces(parts), protocol.after(board.number("saved", rank), number))

    def close(self) -> None:
        if self.handover is not None:
            self.handover.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
