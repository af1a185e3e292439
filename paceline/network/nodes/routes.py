"""Workers that cannot reach a server although the coordinator reaches both: when to warn, and when to stop waiting.

Each worker writes on the board since when a server that listens has been out of its reach. A node that the hub does not
reach either is lost as a whole, which the coordinator handles.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.processes.memory.board import Board

TELL = 3.0  # seconds without a route before a warning, or a third of patience if that is less


class Routes:
    """What the hub knows of routes that are cut. `name`: what a worker is called, with its host."""

    def __init__(self, board: Board, patience: float, warn: Callable[[str], None], name: Callable[[int], str]) -> None:
        self._board, self._patience, self._warn, self._name = board, patience, warn, name
        self._told: dict[int, tuple[int, int]] = {}  # by rank: the server, and since when
        self._given_up: set[int] = set()

    def look(self) -> list[int]:
        """The workers that the run continues without from now on. Until that is decided, no process that waits for such
        a worker times out."""
        board, now = self._board, time.monotonic_ns()
        alive = {rank for rank in range(board.workers) if board.alive[rank]}
        cut = {
            rank
            for rank in range(board.workers)
            if board.unreached[rank] and board.node[rank] >= 0 and board.server_port[board.unreached_server[rank]]
        }
        for rank in set(self._told) - cut:
            shard, since = self._told.pop(rank)
            self._given_up.discard(rank)
            if board.node[rank] >= 0:
                self._warn(f"{self._name(rank)} reaches server:{shard} again, after {(now - since) / 1e9:.0f} s")
        found = []
        for rank in cut:
            shard, waited = board.unreached_server[rank], (now - board.unreached[rank]) / 1e9
            if waited > min(TELL, self._patience / 3) and rank not in self._told:
                self._told[rank] = (shard, board.unreached[rank])
                self._warn(f"{self._name(rank)} cannot reach server:{shard}, which listens; it keeps trying")
            if rank not in alive or alive <= cut:  # if no worker reaches the server, the cause is the server
                continue
            board.put("alarm", board.get("alarm") + 1)
            if waited > self._patience and rank not in self._given_up:
                self._given_up.add(rank)
                found.append(rank)
        return found
