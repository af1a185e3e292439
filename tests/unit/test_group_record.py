"""What follows from where everybody stands when a group is formed anew, and who is asked to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.errors import RunError, SchemeError
from paceline.network.means import group_record as circles
from paceline.network.means.group_record import GroupRecord, MeanGroup, MemberPosition
from paceline.processes.memory.board import Board

X, Y = 160, 320  # shapes


def stand(done: int | None, **more: Any) -> MemberPosition:
    settings: dict[str, Any] = {
        "at": True,
        "first": True,
        "shape": X,
        "kept": X if done else 0,
        "took": {},
        "new": False,
    }
    return MemberPosition(done, **(settings | more))


def test_at_first_all_begin_together() -> None:
    future = circles.outlook({0: stand(None), 1: stand(None)})
    assert (future.done, future.members, future.giver, future.behind, future.shape) == (0, [0, 1], None, frozenset(), X)


def test_a_mean_that_nobody_has_had_is_taken_again() -> None:
    future = circles.outlook({0: stand(7), 2: stand(7)})
    assert (future.done, future.giver, future.behind) == (7, None, frozenset())


def test_a_mean_that_somebody_has_had_is_given_to_the_others() -> None:
    future = circles.outlook({0: stand(6), 1: stand(7), 2: stand(7, at=False, shape=0)})
    assert (future.done, future.giver, future.behind) == (7, 1, {0})
    future = circles.outlook({0: stand(6, shape=Y), 2: stand(7, at=False, shape=0, kept=Y)})  # it waits for the end
    assert (future.giver, future.shape) == (2, Y)


def test_nobody_can_be_two_means_behind() -> None:
    with pytest.raises(RunError, match="worker:0 has had 5 means where others have had 7"):
        circles.outlook({0: stand(5), 1: stand(7)})
    with pytest.raises(RunError, match="worker:0 has had 6"):
        circles.outlook({0: stand(6, at=False), 1: stand(7)})
    with pytest.raises(RunError, match="no member has kept the mean that worker:0 has missed"):
        circles.outlook({0: stand(6), 1: stand(7, kept=0)})


def test_different_lengths_at_the_same_mean_are_refused() -> None:
    with pytest.raises(SchemeError, match="different lengths"):
        circles.outlook({0: stand(7), 1: stand(7, shape=Y)})
    circles.outlook({0: stand(6, shape=Y), 1: stand(7, kept=Y)})  # one is still at the mean before


def test_a_newcomer_gets_the_cells_of_one_that_stands_at_the_first_mean_of_its_step() -> None:
    newcomer = stand(None, at=False, first=False, shape=0, new=True)
    future = circles.outlook({0: stand(6), 1: stand(7), 2: newcomer})
    assert (future.donor, future.giver, future.members) == (1, 1, [0, 1, 2])
    future = circles.outlook({0: stand(7, first=False), 1: stand(7, at=False, shape=0), 2: newcomer})
    assert (future.donor, future.members) == (None, [0, 1])  # not yet


@pytest.fixture
def board() -> Iterator[Board]:
    """Three workers, all in their first life."""
    board = Board.create(3, 0)
    for rank in range(3):
        board.alive[rank] = board.life[rank] = 1
    yield board
    os.close(board.descriptor)


def asked(board: Board, record: GroupRecord | None = None, *, hold: bool = False, **more: Any) -> dict[int, int] | None:
    circle = MeanGroup("0/all", (0, 1, 2), **more)
    return circles.proposal(board, circle, record or GroupRecord.read(b""), 0, hold=hold)


def test_all_who_live_are_asked_and_who_is_still_starting_is_waited_for(board: Board) -> None:
    assert asked(board) == {0: 1, 1: 1, 2: 1}
    board.life[2] = 0
    assert asked(board) is None
    board.alive[2] = 0  # it died before it began
    assert asked(board) == {0: 1, 1: 1}
    board.parted[1] = 1
    assert asked(board) == {0: 1}


def test_the_dead_are_left_out_or_waited_for_until_they_are_back(board: Board) -> None:
    board.alive[1], board.lost[1] = 0, 1
    assert asked(board) == {0: 1, 2: 1}
    assert asked(board, hold=True) is None
    board.life[1] = 2
    assert asked(board) == {0: 1, 2: 1}
    board.joining[1] = 1
    assert asked(board) == asked(board, hold=True) == {0: 1, 1: 2, 2: 1}


def test_what_was_agreed_counts_before_words_that_come_late(board: Board) -> None:
    board.life[1], board.lost[1], board.alive[1] = 2, 1, 0  # taken in, but that it is alive is not known here yet
    record = GroupRecord.read(GroupRecord.read(b"").next({0: 1, 1: 2, 2: 1}, by=2))
    assert record.attempt == 1
    assert asked(board, record) == {0: 1, 1: 2, 2: 1}
    board.lost[1] = 2
    assert asked(board, record) == {0: 1, 2: 1}
    board.lost[1] = 1
    assert asked(board, joiner=(1, 2)) == {0: 1, 1: 2, 2: 1}  # another has seen it and said so


def test_a_worker_that_joins_gets_no_cells_of_members_that_another_is_behind(board: Board) -> None:
    board.alive[1], board.lost[1], board.life[1], board.joining[1] = 0, 1, 2, 1
    circle, record = MeanGroup("0/all", (0, 1, 2)), GroupRecord.read(b"")
    for hold, expected in ((False, {0: 1, 2: 1}), (True, None)):
        assert circles.proposal(board, circle, record, 0, hold=hold, gives=lambda _: False) == expected


def test_a_worker_that_has_joined_another_group_belongs_to_this_one(board: Board) -> None:
    board.alive[1], board.lost[1], board.life[1] = 0, 1, 2  # that it is alive is not known here yet
    circle, record = MeanGroup("0/all", (0, 1, 2)), GroupRecord.read(b"")
    assert circles.proposal(board, circle, record, 0, hold=False, known={1: 2}) == {0: 1, 1: 2, 2: 1}
    board.lost[1] = 2
    assert circles.proposal(board, circle, record, 0, hold=False, known={1: 2}) == {0: 1, 2: 1}


def test_a_life_is_over_when_the_launcher_says_so_or_the_next_has_begun(board: Board) -> None:
    members = {0: 1, 1: 1}
    assert not circles.lost(board, members, 0)
    board.life[1] = 2
    assert circles.lost(board, members, 0)
    board.life[1], board.lost[1] = 1, 1
    assert circles.lost(board, members, 0)


def test_number_and_shape_stand_in_one_word(board: Board) -> None:
    board.at_shape[1] = circles.shape_word(70_000, X)
    assert circles.shape_of(board, 1) == (70_000 & 0xFFFF, X)


def test_who_took_part_is_told_unless_it_is_everybody_at_the_same_number() -> None:
    assert not circles.told({"0": 4, "1": 4}, (0, 1))
    assert circles.told({"0": 4, "1": 5}, (0, 1))
    assert circles.told({"0": 4}, (0, 1))
