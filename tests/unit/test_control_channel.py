"""Messages between a role and its launcher."""

from __future__ import annotations

import json
import linecache
import socket
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from paceline.processes.roles.control_channel import LONGEST, Control, Listener, error_of, report_of
from paceline.processes.roles.roles import Role

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


def test_an_error_inside_a_library_names_the_line_of_the_user_too() -> None:
    try:
        torch.zeros(2).sum().backward()
    except RuntimeError as error:
        told = report_of(Role("worker", 1), error, 3)
    own, library = (note for note in told["notes"] if ":" in note)
    assert own.startswith(f"at {__file__}:")
    assert own.endswith(": torch.zeros(2).sum().backward()")
    assert library.startswith("raised in ")
    assert "/torch/" in library


def test_an_error_of_the_user_names_one_line() -> None:
    try:
        raise ValueError("mine")
    except ValueError as error:
        told = report_of(Role("worker", 1), error, 3)
    assert [note.partition(":")[0] for note in told["notes"][:-1]] == [f"at {__file__}"]


def test_a_line_of_a_notebook_is_known_to_the_process_of_the_notebook() -> None:
    linecache.cache["<cell 3>"] = (10, None, ["x = 1\n", "broken(x)\n"], "<cell 3>")
    told = {"kind": "RunError", "where": "chief", "text": "NameError", "notes": ["at <cell 3>:2: ", "at <gone>:1: "]}
    assert error_of(told).__notes__ == ["at <cell 3>:2: broken(x)", "at <gone>:1: "]
