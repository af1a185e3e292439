"""The members of a mean, and what they write in the store before they form a group. Plain data and words of the board.

A *circle* is all means among the same workers. One record in the supervisor's store lists its members, each with the
number of its life. The first worker that finds the record outdated replaces it as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor

from paceline.errors import RunError, SchemeError
from paceline.network.means.group import Group
from paceline.processes.memory.board import Board

Lives = dict[int, int]  # rank -> which life of it


@dataclass
class MeanGroup:
    """What one worker knows of it."""

    key: str  # in the store
    workers: tuple[int, ...]  # its members if all are alive
    generation: int = 0  # how often the run had returned to a checkpoint when it began
    attempt: int = 0  # the record whose group this worker is in; 0: in none
    failed: int = 0  # this worker does not return to records up to this one
    trying: int = 0  # the record whose group it is forming
    members: Lives = field(default_factory=dict)
    groups: dict[int, Group] = field(default_factory=dict)  # by the shape of what is averaged
    done: int | None = None  # means that it has had here; None: it is new here
    kept: Tensor | None = None  # the last mean, kept for members that missed it
    took: dict[str, int] = field(default_factory=dict)  # its members, and which of its own means it was for each
    joiner: tuple[int, int] | None = None  # a worker that waits to be taken in, and its life
    called: bool = False  # a member asks for another group
    used: int = 0  # when, as a count

    def bury(self) -> None:
        """Be in no group any more."""
        self.failed, self.attempt = max(self.failed, self.attempt), 0
        for group in self.groups.values():
            group.bury()
        self.groups.clear()
        self.members = {}


@dataclass(frozen=True)
class GroupRecord:
    """The members of the next group, as the store has them. No worker is asked twice under the same number."""

    attempt: int
    members: Lives
    text: bytes

    @classmethod
    def read(cls, text: bytes) -> GroupRecord:
        if not text:
            return cls(0, {}, text)
        told = json.loads(text)
        return cls(told["attempt"], {int(rank): life for rank, life in told["members"].items()}, text)

    def next(self, members: Lives, by: int) -> bytes:
        return json.dumps({"attempt": self.attempt + 1, "members": members, "by": by}).encode()


@dataclass(frozen=True)
class MemberPosition:
    """Where a worker stands when it comes to form a group."""

    done: int | None
    at: bool  # it has arrived at a mean of this circle
    first: bool  # which is the first of its step
    shape: int  # of what it brings,
    kept: int  # and of the last mean that it has had
    took: dict[str, int]
    new: bool  # it needs the cells of another

    def written(self) -> bytes:
        return json.dumps(self.__dict__).encode()

    @classmethod
    def read(cls, text: bytes) -> MemberPosition:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class GroupPlan:
    """What follows from the positions of all members: the same for each, because it is derived from the same data."""

    done: int  # means that all have had once those behind have got the last
    members: list[int]
    giver: int | None  # gives the last mean to those behind
    behind: frozenset[int]
    donor: int | None  # gives its cells to those that are new
    shape: int  # of the mean that comes next, as far as it is known


def outlook(stands: dict[int, MemberPosition]) -> GroupPlan:
    had = [stand.done for stand in stands.values() if stand.done is not None]
    done = max(had, default=0)
    behind = frozenset(rank for rank, stand in stands.items() if stand.done is not None and stand.done < done)
    for rank in behind:
        if stands[rank].done != done - 1 or not stands[rank].at:
            raise RunError(f"worker:{rank} has had {stands[rank].done} means where others have had {done}")
    ahead = [rank for rank in sorted(stands) if rank not in behind and not stands[rank].new]
    giver = next((rank for rank in ahead if stands[rank].done == done and stands[rank].kept), None) if behind else None
    if behind and giver is None:
        raise RunError(f"no member has kept the mean that worker:{min(behind)} has missed")
    next_ones = [rank for rank in ahead if stands[rank].at]
    shapes = {stands[rank].shape for rank in next_ones}
    if len(shapes) > 1:
        raise SchemeError("a mean of vectors of different lengths")
    donor = next((rank for rank in next_ones if stands[rank].first), None)
    members = [rank for rank in sorted(stands) if donor is not None or not stands[rank].new]
    shape = shapes.pop() if shapes else 0 if giver is None else stands[giver].kept
    return GroupPlan(done, members, giver, behind, donor, shape)


def lost(board: Board, members: Lives, me: int) -> bool:
    """Whether one of these lives has ended by force."""
    return any(board.lost[rank] >= life or board.life[rank] > life for rank, life in members.items() if rank != me)


def parted(board: Board, members: Lives) -> bool:
    return any(board.parted[rank] or board.gone[rank] for rank in members)


def proposal(
    board: Board,
    circle: MeanGroup,
    record: GroupRecord,
    me: int,
    *,
    hold: bool,
    gives: Callable[[int], bool] = lambda _: True,
    known: Mapping[int, int] = MappingProxyType({}),
) -> Lives | None:
    """The members of the next group; None: wait for another worker first. A member of the last record that has not died
    is in: the board's word that it is alive may not have arrived here yet. `gives`: whether a worker that waits to join
    may have the cells of this group's members. `known`: lives that are in another group of this worker."""
    members: Lives = {}
    for rank in circle.workers:
        if rank == me:
            members[rank] = board.life[rank]
            continue
        if board.parted[rank] or board.gone[rank]:
            continue
        life = board.life[rank]
        inside = life in (record.members.get(rank), known.get(rank))
        comes = (board.joining[rank] or circle.joiner == (rank, life)) and gives(rank)
        if life > board.lost[rank] and (board.alive[rank] or inside or comes):
            members[rank] = life
        elif board.alive[rank] or hold:
            return None
    return members


def shape_of(board: Board, rank: int) -> tuple[int, int]:
    """Where a worker stands by the board: the number of the mean (its last bits), and the shape."""
    word: int = board.at_shape[rank]
    return word >> 44, word & ((1 << 44) - 1)


def shape_word(index: int, shape: int) -> int:
    """Both in one word: they are read together or not at all."""
    return (index & 0xFFFF) << 44 | shape


def told(took: dict[str, Any], workers: tuple[int, ...]) -> bool:
    """Whether the members must be logged: some are missing, or they were at different numbers."""
    return len(took) < len(workers) or len(set(took.values())) > 1
