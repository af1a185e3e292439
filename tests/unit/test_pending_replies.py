"""Answers that lie in the server's state until it changes."""

from __future__ import annotations

import pytest
import torch
from remote_ends import LENGTH, Server, server

from paceline.processes.calls import zero_copy
from paceline.processes.calls.zero_copy import PendingReplies
from paceline.processes.memory.board import LANES

SIZE = 4 * LENGTH


@pytest.fixture(autouse=True)
def low(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_copy, "LARGE", SIZE)


def places(made: Server, index: int) -> tuple[int, int]:
    """Where x lies, and the reply of a lane."""
    return made.stage.layout.places["server.x"].offset, made.lanes[index].reply_at


def noted(made: Server, *indices: int) -> PendingReplies:
    account = made.door.owed
    for index in indices:
        assert account.note(made.lanes[index], made.stage.tensor("server.x"), places(made, index)[1])
    return account


def test_what_lies_in_the_state_is_copied_before_it_changes() -> None:
    with server() as made:
        account = noted(made, 1)
        x, reply = places(made, 1)
        assert account
        assert account.of(made.lanes[1]) == (x, reply, SIZE)
        assert account.of(made.lanes[0]) is None
        assert list(account.settle()) == [(made.lanes[1], x, reply, SIZE)]
        memory = made.stage.segment.memory
        assert memory[reply : reply + SIZE] == memory[x : x + SIZE] == torch.arange(float(LENGTH)).numpy().tobytes()
        assert not account
        assert account.of(made.lanes[1]) is None


def test_only_large_parts_of_the_state_in_one_piece_may_stay_where_they_are() -> None:
    with server() as made:
        x, lane, account = made.stage.tensor("server.x"), made.lanes[0], made.door.owed
        for other in (x[:-1], x.clone(), x[::2], x[1:], x.double(), torch.zeros(100)):
            assert not account.note(lane, other, lane.reply_at)
        assert account.note(lane, x, lane.reply_at)
        assert not account.note(lane, x, lane.reply_at + 1024)  # one of an answer
        assert account.of(lane) == (*places(made, 0), SIZE)


def test_who_has_its_answer_or_has_asked_for_another_thing_since_needs_no_copy() -> None:
    with server() as made:
        account = noted(made, 0, 1, 2, LANES + 1)
        account.had(0, 0b0110)
        assert [made.lanes.index(lane) for lane in account._lanes] == [1, 2, LANES + 1]
        made.board.posted[2] += 1
        _, reply = places(made, 2)
        assert [lane.index for lane, *_ in account.settle()] == [1, LANES + 1]
        assert made.stage.segment.memory[reply : reply + SIZE] == bytes(SIZE)


def test_a_successor_finds_what_is_owed() -> None:
    with server() as made:
        noted(made, 3)
        successor = PendingReplies(made.stage, 0, made.lanes)
        assert successor
        assert successor.of(made.lanes[3]) == (*places(made, 3), SIZE)
        assert [lane.index for lane, *_ in successor.settle()] == [3]
        assert not PendingReplies(made.stage, 0, made.lanes)


def test_servers_of_one_node_have_accounts_of_their_own() -> None:
    with server(servers=2) as made:
        other = PendingReplies(made.stage, 1, made.lanes)
        part = made.stage.shard_state(1).x
        zero_copy.LARGE = 4
        assert other.note(made.lanes[0], part, made.lanes[0].reply_at)
        assert made.door.owed.of(made.lanes[0]) is None
        assert not PendingReplies(made.stage, 0, made.lanes)
