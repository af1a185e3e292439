"""The boards of all nodes kept alike: each side sends the other the words that have changed.

A word has one writer at a time, so two sides never write the same word. The words of the whole run are written after
all others: a process that reads that the run is ready, or returns to a checkpoint, finds the rest in place.
"""

from __future__ import annotations

import contextlib
import os
import selectors
from collections.abc import Iterator

import numpy as np

from paceline.network.secure.channel import ProtocolError
from paceline.processes.memory.board import CLOCKS, GENERATION, RUN, STOP, Board
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.memory.wakeup import Wakeup

PAIR = 16  # bytes: a word's number, and its value
_LAST = (GENERATION, STOP)


class BoardReplica:
    """One side's knowledge of the other's board. `ahead`: ns by which the other's clock is ahead of this one."""

    def __init__(self, board: Board, ahead: int = 0) -> None:
        self._board = board
        self._live = np.frombuffer(board.words, dtype=np.int64)[: board.common]
        self._told = np.zeros(board.common, dtype=np.int64)
        self._clocks = np.zeros(board.common, dtype=bool)
        self._clocks[CLOCKS] = True
        self._ahead = ahead
        self._memory: RunMemory | None = None
        self._counts: list[int] = []  # of versions, as the other knows them
        self.withheld: frozenset[int] = frozenset()  # words that go another way

    def open(self, memory: RunMemory) -> None:
        """From now on replicate the versions of the centre too, which are in the state."""
        self._memory, self._counts = memory, [-1] * len(memory.version_words())

    def news(self, mine: list[bool] | None = None) -> bytes:
        """What the other does not know yet. `mine`: which versions are this side's to tell."""
        now = self._live.copy()
        changed = np.flatnonzero(now != self._told)
        if self.withheld:
            changed = np.array([index for index in changed.tolist() if index not in self.withheld], dtype=np.int64)
        values = now[changed]
        self._told[changed] = values
        if self._ahead:
            shifted = self._clocks[changed] & (values != 0)
            values = np.where(shifted, values + self._ahead, values)
        pairs = np.stack([changed, values], axis=1).tobytes() if len(changed) else b""
        if self._memory is not None:
            for number, version in enumerate(self._memory.versions()):
                if version != self._counts[number] and (mine is None or mine[number]):
                    self._counts[number] = version
                    pairs += np.array([self._board.common + number, version], dtype=np.int64).tobytes()
        return pairs

    def hear(self, pairs: bytes | bytearray) -> None:
        """Write the other side's words on this board. ProtocolError: the board has no such words."""
        if len(pairs) % PAIR:
            raise ProtocolError(f"{len(pairs)} bytes are no pairs of words")
        rows = np.frombuffer(pairs, dtype=np.int64).reshape(-1, 2)
        if not len(rows):
            return
        most = self._board.common + len(self._counts)
        if rows[:, 0].min() < 0 or rows[:, 0].max() >= most:
            raise ProtocolError(f"a word beyond the {most} of the board")
        # first: who reads that a node has a notice finds how far its workers were then
        for number, version in rows[rows[:, 0] >= self._board.common].tolist():
            self._hear_version(number - self._board.common, version)
        words = rows[rows[:, 0] < self._board.common]
        index, values = words[:, 0], words[:, 1].copy()
        if self._ahead:
            shifted = self._clocks[index] & (values != 0)
            values[shifted] -= self._ahead
        late = index < len(RUN)
        self._live[index[~late]] = values[~late]
        self._told[index[~late]] = values[~late]
        run = self._board.run
        pending = dict(zip(index[late].tolist(), values[late].tolist(), strict=True))
        for one in sorted(pending, key=lambda word: (word in _LAST, word)):
            # a stop is never taken back
            run[one] = max(run[one], pending[one]) if one == STOP else pending[one]
            self._told[one] = pending[one]

    def _hear_version(self, number: int, version: int) -> None:
        """Write a version, unless a reply has brought a newer one. Only a return to a checkpoint lowers a version: then
        it is lower than the last that was sent."""
        assert self._memory is not None
        if version < self._counts[number] or version > self._memory.versions()[number]:
            self._memory.set_version(number, version)
        self._counts[number] = version


class RemoteWakeups:
    """Reads the wakeup pipes of roles on other nodes: a process that wakes such a role wakes this one instead, which
    sends the news to the other nodes."""

    def __init__(self, selector: selectors.BaseSelector, board: Board, pipes: list[int]) -> None:
        self._selector, self._board, self._pipes = selector, board, pipes
        self._places: set[int] = set()

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._places))

    def set(self, place: int, remote: bool) -> None:
        """Whether the role of a pipe is on another node."""
        if remote and place not in self._places:
            self._places.add(place)
            self._selector.register(self._pipes[2 * place], selectors.EVENT_READ)
        elif not remote and place in self._places:
            self._places.discard(place)
            self._selector.unregister(self._pipes[2 * place])
        self._board.sleeping[place] = int(remote)

    def drain(self) -> None:
        for place in self._places:
            with contextlib.suppress(BlockingIOError):
                os.read(self._pipes[2 * place], 4096)

    def ring_local(self, wakeup: Wakeup) -> None:
        """Wake every role of this node."""
        for place in range(self._board.roles):
            if place not in self._places:
                wakeup.ring(place)
