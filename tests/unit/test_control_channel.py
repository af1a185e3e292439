"""Messages between a role and its launcher."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from paceline.processes.roles.control_channel import LONGEST, Control, Listener

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


plain = some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False) | some.text()
contents = some.recursive(plain, lambda inner: some.lists(inner) | some.dictionaries(some.text(), inner), max_leaves=10)


@settings(max_examples=30)
@given(some.lists(some.dictionaries(some.text(), contents), max_size=3))
def test_messages_arrive_whole_and_in_order(messages: list[dict[str, object]]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        listener = Listener(ours)
        for message in messages:
            Control(theirs).send(message)
        assert listener.messages() == messages
        assert listener.messages() == []


def test_half_a_message_waits_for_the_rest(pair: Pair) -> None:
    ours, theirs = pair
    listener = Listener(ours)
    line = json.dumps({"say": "grüße"}, ensure_ascii=False).encode() + b"\n"
    for byte in line[:-1]:
        theirs.sendall(bytes([byte]))
        assert listener.messages() == []
    theirs.sendall(line[-1:] + line)
    assert listener.messages() == [{"say": "grüße"}] * 2


def test_a_line_without_an_end_is_not_kept_for_ever(pair: Pair) -> None:
    ours, theirs = pair
    listener = Listener(ours)
    for _ in range(LONGEST // (1 << 16) + 1):
        theirs.sendall(bytes(1 << 16))
        assert listener.messages() == []
    theirs.sendall(b'"}\n{"say": "still there"}\n')
    assert listener.messages() == [{"say": "still there"}]


def test_much_at_once_is_no_line_without_an_end(pair: Pair) -> None:
    ours, theirs = pair
    listener, control = Listener(ours), Control(theirs)
    for number in range(40):
        control.send({"say": "x" * 1000, "number": number})
    assert [message["number"] for message in listener.messages()] == list(range(40))


def test_waiting_for_the_next_one_and_for_the_end(pair: Pair) -> None:
    ours, theirs = pair
    listener = Listener(ours)
    ours.setblocking(True)
    Control(theirs).send({"status": 1})
    assert listener.wait() == ([{"status": 1}], True)
    theirs.close()
    assert listener.wait() == ([], False)
    assert listener.messages() == []


def test_nobody_listens_any_more(pair: Pair) -> None:
    ours, theirs = pair
    ours.close()
    Control(theirs).send({"say": "into the void"})
