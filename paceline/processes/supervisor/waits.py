"""What each worker waits for, as the launcher finds out: it reads the board and the mailboxes, and workers do nothing.

A worker that trains waits in every step, for a moment. Only a long wait is told: one that has lasted for `LONG`
seconds, or the same one again and again in most samples of the last `SPAN` seconds.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from paceline.ops import Call
from paceline.processes.calls.mailbox import Mailbox, got
from paceline.processes.memory.board import MAILBOXES, WAITING, Board
from paceline.processes.memory.call_codec import decode
from paceline.processes.memory.packed_words import looked_for, mean_key, method_of
from paceline.processes.memory.run_memory import RunMemory
from paceline.scheme import ServerMethod

LONG = 0.5  # seconds after which a single wait is told
SPAN = 2.0  # seconds over which short waits are counted,
SHARE = 0.6  # the share of all samples that must be one and the same wait,
FEWEST = 8  # and the number of samples that this takes
EVERY = 0.1  # seconds between two samples
MOST = 3  # processes that are named


class Waits:
    """Samples what every worker waits for."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[tuple[int, ...], float]] = {}  # a wait, by words that change with it
        self._samples: deque[tuple[float, dict[int, str]]] = deque()
        self._told: dict[int, str] = {}

    def at(self, now: float, memory: RunMemory) -> dict[int, str]:
        """The workers that wait for long, and for what."""
        if self._samples and now - self._samples[-1][0] < EVERY:
            return self._told
        board = memory.board
        waiting = [rank for rank in range(board.workers) if board.alive[rank] and board.state[rank] == WAITING]
        briefly = {rank: brief(memory, rank) for rank in waiting}
        self._samples.append((now, briefly))
        while now - self._samples[0][0] > SPAN:
            self._samples.popleft()
        self._since = {rank: self._one(rank, now, board) for rank in waiting}
        self._told = {}
        for rank in range(board.workers):
            lasted = now - self._since[rank][1] if rank in self._since else 0.0
            if lasted >= LONG:  # arguments differ at every step: they are told of a wait that is not one of many
                self._told[rank] = (detailed(memory, rank) if lasted >= SPAN else "") or briefly[rank]
            elif board.alive[rank] and (often := self._often(rank)):
                self._told[rank] = often
        return self._told

    def _one(self, rank: int, now: float, board: Board) -> tuple[tuple[int, ...], float]:
        """The wait that a worker is in, and since when it has been seen."""
        first = board.mailbox(rank, 0)
        posted = board.posted[first : first + MAILBOXES]
        mark = (board.t[rank], board.gradients[rank], board.at_seq[rank], board.awaited[rank], *posted)
        known, since = self._since.get(rank, (mark, now))
        return (mark, since) if known == mark else (mark, now)

    def _often(self, rank: int) -> str:
        """The wait that a worker was in at most moments; empty if there is none."""
        if len(self._samples) < FEWEST:
            return ""
        found = Counter(sample[rank] for _, sample in self._samples if rank in sample)
        (text, count), *_ = found.most_common(1) or [("", 0)]
        return text if count >= SHARE * len(self._samples) else ""


def brief(memory: RunMemory, rank: int) -> str:
    """What a worker waits for, in words that are the same at every step."""
    board = memory.board
    if board.at_key[rank] and board.at_seq[rank] > board.finished[rank]:
        return f"{_missing(memory, rank)} at a mean"
    method = _method(memory, rank)
    if method is not None and method.when is not None:
        return f"{method.name}: guard {_guard(method)}"
    if not board.awaited[rank]:
        return "other processes"
    server = "the server" if memory.plan.servers == 1 else "the servers"
    return f"{server} to perform {method.name}" if method is not None else server


def detailed(memory: RunMemory, rank: int) -> str:
    """The guarded call that a worker waits for, with its arguments; empty if it waits for something else."""
    call = _call(memory, rank)
    if call is None or call.method.when is None:
        return ""
    return f"{call}: guard {_guard(call.method)}"


@cache  # it is read from the source
def _guard(method: ServerMethod[Any, Any]) -> str:
    return method.guard_text()


def _missing(memory: RunMemory, rank: int) -> str:
    """The processes whose workers have not arrived at the mean that a worker waits at."""
    board, hosts = memory.board, memory.plan.hosts
    key = board.at_key[rank]
    if key != mean_key(None, board.get("generation")):
        return "others of its group"  # the key does not tell who is in the group
    present = (r for r in range(board.workers) if board.alive[r] and not board.parted[r])
    # one that is still in an earlier step has yet to leave the mean of that step
    missing = [
        r
        for r in present
        if board.at_key[r] != key or board.at_seq[r] <= board.finished[r] or board.t[r] < board.t[rank]
    ]
    indices = sorted({r % hosts for r in missing})
    return named([f"worker {index}" if index else "the chief" for index in indices]) if missing else "the others"


def named(names: Sequence[str]) -> str:
    """A short list of names."""
    more = [f"{len(names) - MOST} more"] if len(names) > MOST else []
    return ", ".join([*names[:MOST], *more])


def _method(memory: RunMemory, rank: int) -> ServerMethod[Any, Any] | None:
    """The method that a worker waits for the result of; None if that cannot be seen from this node."""
    number = looked_for(memory.board.awaited[rank])
    if number is None:
        mailbox = _awaited(memory, rank)
        number = -1 if mailbox is None else method_of(mailbox.request[-1])
    names = sorted(memory.scheme.methods)
    return memory.scheme.methods[names[number]] if 0 <= number < len(names) else None


def _call(memory: RunMemory, rank: int) -> Call[Any] | None:
    mailbox = _awaited(memory, rank)
    if mailbox is None:
        return None
    methods = [memory.scheme.methods[name] for name in sorted(memory.scheme.methods)]
    number, words, kind = memory.board.posted[mailbox.index], got(mailbox.request), mailbox.request[-1]
    again = _awaited(memory, rank)
    # a mailbox is not changed while its call is under way: what was read of one that is still awaited is whole
    if again is None or memory.board.posted[again.index] != number or not 0 <= method_of(kind) < len(methods):
        return None
    return Call(methods[method_of(kind)], decode(words, _shaped))


def _shaped(_: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _awaited(memory: RunMemory, rank: int) -> Mailbox | None:
    """The mailbox whose reply a worker of this node waits for."""
    board = memory.board
    index = board.awaited[rank] - 1
    if index < 0 or not memory.beside(rank) or board.posted[index] == board.answered[0][index]:
        return None
    return Mailbox(memory, rank, index - board.mailbox(rank, 0))
