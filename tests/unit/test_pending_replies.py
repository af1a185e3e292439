"""Answers that lie in the server's state until it changes."""

from __future__ import annotations

import pytest
import torch
from remote_ends import LENGTH, Server, server

from paceline.processes.calls import zero_copy
from paceline.processes.calls.zero_copy import PendingReplies
from paceline.processes.memory.board import MAILBOXES

SIZE = 4 * LENGTH


@pytest.fixture(autouse=True)
def low(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_copy, "LARGE", SIZE)


def places(made: Server, index: int) -> tuple[int, int]:
    """Where x lies, and the reply of a lane."""
    return made.memory.layout.places["server.x"].offset, made.mailboxes[index].reply_at


def noted(made: Server, *indices: int) -> PendingReplies:
    account = made.door.owed
    for index in indices:
        assert account.note(made.mailboxes[index], made.memory.tensor("server.x"), places(made, index)[1])
    return account


def test_what_lies_in_the_state_is_copied_before_it_changes() -> None:
    with server() as made:
        account = noted(made, 1)
        x, reply = places(made, 1)
        assert account
        assert account.of(made.mailboxes[1]) == (x, reply, SIZE)
        assert account.of(made.mailboxes[0]) is None
        assert list(account.settle()) == [(made.mailboxes[1], x, reply, SIZE)]
        memory = made.memory.segment.memory
        assert memory[reply : reply + SIZE] == memory[x : x + SIZE] == torch.arange(float(LENGTH)).numpy().tobytes()
        assert not account
        assert account.of(made.mailboxes[1]) is None


def test_only_large_parts_of_the_state_in_one_piece_may_stay_where_they_are() -> None:
    with server() as made:
        x, mailbox, account = made.memory.tensor("server.x"), made.mailboxes[0], made.door.owed
        for other in (x[:-1], x.clone(), x[::2], x[1:], x.double(), torch.zeros(100)):
            assert not account.note(mailbox, other, mailbox.reply_at)
        assert account.note(mailbox, x, mailbox.reply_at)
        assert not account.note(mailbox, x, mailbox.reply_at + 1024)  # one of an answer
        assert account.of(mailbox) == (*places(made, 0), SIZE)


def test_who_has_its_answer_or_has_asked_for_another_thing_since_needs_no_copy() -> None:
    with server() as made:
        account = noted(made, 0, 1, 2, MAILBOXES + 1)
        account.had(0, 0b0110)
        assert [made.mailboxes.index(mailbox) for mailbox in account._mailboxes] == [1, 2, MAILBOXES + 1]
        made.board.posted[2] += 1
        _, reply = places(made, 2)
        assert [mailbox.index for mailbox, *_ in account.settle()] == [1, MAILBOXES + 1]
        assert made.memory.segment.memory[reply : reply + SIZE] == bytes(SIZE)


def test_a_successor_finds_what_is_owed() -> None:
    with server() as made:
        noted(made, 3)
        successor = PendingReplies(made.memory, 0, made.mailboxes)
        assert successor
        assert successor.of(made.mailboxes[3]) == (*places(made, 3), SIZE)
        assert [mailbox.index for mailbox, *_ in successor.settle()] == [3]
        assert not PendingReplies(made.memory, 0, made.mailboxes)


def test_servers_of_one_node_have_accounts_of_their_own() -> None:
    with server(servers=2) as made:
        other = PendingReplies(made.memory, 1, made.mailboxes)
        part = made.memory.shard_state(1).x
        zero_copy.LARGE = 4
        assert other.note(made.mailboxes[0], part, made.mailboxes[0].reply_at)
        assert made.door.owed.of(made.mailboxes[0]) is None
        assert not PendingReplies(made.memory, 0, made.mailboxes)
