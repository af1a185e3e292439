"""A server's port for workers of other nodes, and servers that follow its order, against all that they may be sent."""

from __future__ import annotations

import errno
import socket
import struct
from array import array
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from net_ends import PATIENCE, SECRET
from remote_ends import LENGTH, Server, bytes_of, is_open, opened, said, server, small

from paceline.network.calls import tcp_client
from paceline.network.calls.tcp_connection import AGAIN, EARLY, HEAD, HELLO, ORDER, POST, REPLY, WELCOME
from paceline.network.calls.tcp_server import OrderFollower, TcpServer
from paceline.network.secure import admission
from paceline.processes.calls.mailbox import COUNT, SAVE, SET, SHOW, Mailbox, put, received
from paceline.processes.memory.board import MAILBOXES, RING, STOPPING
from paceline.processes.memory.call_codec import NONE, TENSOR, TEXT, WHOLE, encode
from paceline.processes.memory.packed_words import asks_when
from paceline.processes.memory.run_memory import RunMemory
from paceline.runs.order_log import MemberEvent

BOTH, LOOK, MANY = range(3)  # the numbers of the scheme's methods
EMPTY = [0]


def args_of(made: Server, rank: int, mailbox: int = 0) -> int:
    return made.memory.layout.places[f"lane.{rank}.{mailbox}.args"].offset


def greeted(made: Server, rank: int) -> socket.socket:
    connection = made.let_in()
    assert made.hear(bytes_of(HELLO, rank), connection)
    return connection


def call(made: Server, rank: int, number: int, mailbox: int = 0) -> bytes:
    """both(g, t), with ones for g."""
    at = args_of(made, rank, mailbox)
    words = [2, TENSOR, 0, at, 1, LENGTH, WHOLE, 7]
    ones = torch.ones(LENGTH).numpy().tobytes()
    return bytes_of(POST, rank * MAILBOXES + mailbox, number, BOTH, words=words, pieces=[(at, len(ones))], data=ones)


# the door


def test_a_call_lies_in_its_lane_as_if_it_had_been_posted_here() -> None:
    with server() as made:
        connection = greeted(made, 1)
        assert made.hear(call(made, 1, 5, mailbox=2), connection)
        index = MAILBOXES + 2
        assert made.board.posted.tolist() == [5 if one == index else 0 for one in range(2 * MAILBOXES)]
        methods = [made.memory.scheme.methods[name] for name in sorted(made.memory.scheme.methods)]
        found = received(made.memory, made.mailboxes[index], methods, made.memory.bounds(0))
        assert found.method is methods[BOTH]
        assert found.args[0].tolist() == [1.0] * LENGTH
        assert found.args[1] == 7


def test_a_worker_is_told_how_far_its_lanes_are() -> None:
    with server() as made:
        made.board.posted[MAILBOXES + 1], made.board.answered[0][MAILBOXES + 1] = 9, 8
        connection = made.let_in()
        connection.sendall(bytes_of(HELLO, 1))
        made.memory.wakeup.look()
        heard = connection.recv(1000)
        kind, _, mailbox, *_, words, pieces = HEAD.unpack_from(heard)
        assert (kind, mailbox, words, pieces) == (WELCOME, 1, 2 * MAILBOXES, 0)
        assert list(array("q", heard[HEAD.size :])) == [0, 9, 0, 0, 0, 8, 0, 0]


def test_a_call_that_came_before_is_not_taken_twice() -> None:
    with server() as made:
        connection = greeted(made, 0)
        assert made.hear(call(made, 0, 5), connection)
        made.mailboxes[0].request[1] = 1234  # as it lies there now
        assert made.hear(call(made, 0, 5), connection)
        assert made.mailboxes[0].request[1] == 1234


def test_an_answer_is_sent_again_to_who_has_not_heard_it() -> None:
    with server() as made:
        mailbox = made.mailboxes[0]
        made.board.posted[0] = made.board.answered[0][0] = 3
        reply = made.memory.layout.places["lane.0.0.reply"].offset
        put(mailbox.reply, encode((torch.zeros(2),), lambda _: reply))
        mailbox.pieces = [(reply, 8)]
        made.board.put("stop", STOPPING)
        made.memory.set_version(0, 77)
        connection = made.let_in()
        made.hear(bytes_of(HELLO, 0), connection)
        connection.sendall(bytes_of(AGAIN, 0, 2) + bytes_of(AGAIN, 0, 3))
        made.memory.wakeup.look()
        made.memory.wakeup.look()
        heard = connection.recv(1000)
        kind, _, index, number, value, more, words, pieces = HEAD.unpack_from(heard)
        assert (kind, index, number, value, more, pieces) == (REPLY, 0, 3, 77, STOPPING, 1)
        assert len(heard) == HEAD.size + 8 * words + 16 + 8  # the one that was asked for, and no other


def test_an_answer_that_nobody_has_written_is_empty() -> None:
    with server() as made:
        connection = greeted(made, 0)
        assert made.hear(bytes_of(AGAIN, 0, 0), connection)  # to a lane that was never used


def test_who_comes_again_replaces_itself() -> None:
    with server() as made:
        first, other = greeted(made, 0), greeted(made, 1)
        second = greeted(made, 0)
        assert not is_open(first)
        assert is_open(other)
        assert made.hear(call(made, 0, 1), second)


def strange(made: Server) -> dict[str, bytes]:
    """What worker 0 must not say, after its HELLO."""
    own, other = args_of(made, 0), args_of(made, 1)
    head = made.memory.layout.places["lane.0.1.head"].offset
    x = made.memory.layout.places["server.x"].offset
    tensor = [1, TENSOR, 0, own, 1]
    return {
        "hello again": bytes_of(HELLO, 0),
        "reply": bytes_of(REPLY, 0, 1, words=[0]),
        "welcome": bytes_of(WELCOME, 0, words=[0] * 2 * MAILBOXES),
        "order": bytes_of(ORDER, 0, 0, words=[0]),
        "lane of another": bytes_of(POST, MAILBOXES, 1, LOOK, words=EMPTY),
        "no such lane": bytes_of(POST, 0xFFFFFFFF, 1, LOOK, words=EMPTY),
        "again of another": bytes_of(AGAIN, MAILBOXES, 1),
        "no words": bytes_of(POST, 0, 1, LOOK),
        "words missing": bytes_of(POST, 0, 1, MANY, words=[3, NONE]),
        "words left over": bytes_of(POST, 0, 1, MANY, words=[0, NONE]),
        "too many words": bytes_of(POST, 0, 1, MANY, words=[511, *[NONE] * 511]),
        "no such method": bytes_of(POST, 0, 1, 3, words=EMPTY),
        "nor to be told of": bytes_of(POST, 0, 1, asks_when(3), words=EMPTY),
        "nor so far": bytes_of(POST, 0, 1, 1 << 62, words=EMPTY),
        "what befalls workers": bytes_of(POST, 0, 1, MemberEvent.LEFT, words=EMPTY),
        "lowest": bytes_of(POST, 0, 1, -(1 << 63), words=EMPTY),
        "too few values": bytes_of(POST, 0, 1, BOTH, words=[1, WHOLE, 1]),
        "too many values": bytes_of(POST, 0, 1, LOOK, words=[1, NONE]),
        "save with values": bytes_of(POST, 0, 1, SAVE, words=[1, NONE]),
        "tensor of another": bytes_of(POST, 0, 1, MANY, words=[1, TENSOR, 0, other, 1, LENGTH]),
        "the centre itself": bytes_of(POST, 0, 1, MANY, words=[1, TENSOR, 0, x, 1, LENGTH]),
        "negative size": bytes_of(POST, 0, 1, MANY, words=[*tensor, -1]),
        "beyond the lane": bytes_of(POST, 0, 1, MANY, words=[*tensor, 1 << 40]),
        "set nothing known": bytes_of(POST, 0, 1, SET, words=encode(("no such", 1.0), lambda _: 0)),
        "set to nonsense": bytes_of(POST, 0, 1, SET, words=encode(("lr", "quick"), lambda _: 0)),
        "set without value": bytes_of(POST, 0, 1, SET, words=encode(("lr",), lambda _: 0)),
        "set to a tensor": bytes_of(POST, 0, 1, SET, words=[2, TEXT, 2, 0x726C, *tensor[1:], 1]),
        "set a tensor": bytes_of(POST, 0, 1, SET, words=[2, *tensor[1:], 1, NONE]),
        "into words": bytes_of(POST, 0, 1, LOOK, words=EMPTY, pieces=[(head, 8)], data=bytes(8)),
        "into the centre": bytes_of(POST, 0, 1, LOOK, words=EMPTY, pieces=[(x, 8)], data=bytes(8)),
        "into another": bytes_of(POST, 0, 1, LOOK, words=EMPTY, pieces=[(other, 8)], data=bytes(8)),
        "early into words": bytes_of(EARLY, pieces=[(head, 8)], data=bytes(8)),
        "early into the centre": bytes_of(EARLY, pieces=[(x, 8)], data=bytes(8)),
        "early into another": bytes_of(EARLY, pieces=[(other, 8)], data=bytes(8)),
    }


with server() as _made:
    STRANGE = tuple(strange(_made))


@pytest.mark.parametrize("what", STRANGE)
def test_what_a_worker_must_not_say_ends_its_connection_and_nothing_else(
    what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with server() as made:
        connection, other = greeted(made, 0), greeted(made, 1)
        before, board = bytes(made.memory.segment.memory), made.board.words.tobytes()
        assert not made.hear(strange(made)[what], connection)
        assert bytes(made.memory.segment.memory) == before
        assert made.board.words.tobytes() == board
        assert "server:0: closed a connection: " in capsys.readouterr().out
        assert made.hear(call(made, 1, 1), other)
        assert made.board.posted[MAILBOXES] == 1


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (SAVE, ()),
        (SHOW, ()),
        (COUNT, ()),
        (SET, ("lr", 0.5)),
        (MANY, ()),
        (MANY, (1, "a", None)),
        (asks_when(LOOK), ()),
    ],
)
def test_what_a_worker_may_ask_for(kind: int, values: tuple[object, ...]) -> None:
    with server() as made:
        connection = greeted(made, 0)
        assert made.hear(bytes_of(POST, 0, 1, kind, words=encode(values, lambda _: 0)), connection)
        assert made.board.posted[0] == 1
        assert made.mailboxes[0].request[-1] == kind


def test_a_part_of_a_gradient_lies_where_it_belongs_and_is_no_call() -> None:
    with server() as made:
        connection = greeted(made, 1)
        g = made.memory.tensor("grad.1.0")
        place = made.memory.layout.places["grad.1.0"].offset
        board = made.board.words.tobytes()
        part = bytes_of(EARLY, pieces=[(place + 8, 8)], data=struct.pack("<2f", 1.5, 2.5))
        assert made.hear(part, connection)
        assert g.tolist() == [0.0, 0.0, 1.5, 2.5, 0.0, 0.0]
        assert made.board.words.tobytes() == board
        assert made.hear(call(made, 1, 1), connection)


def test_before_it_says_who_it_is_nobody_may_say_anything() -> None:
    with server() as made:
        for data in (
            call(made, 0, 1),
            bytes_of(AGAIN),
            bytes_of(EARLY),
            bytes_of(HELLO, 3),
            bytes_of(HELLO, 0xFFFFFFFF),
        ):
            assert not made.hear(data, made.let_in())
        assert made.board.posted.tolist() == [0] * 2 * MAILBOXES


def test_a_server_that_had_no_descriptors_left_admits_workers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that came meanwhile, without another connection that would show on the gate."""
    monkeypatch.setattr(admission, "_PAUSE", 0.05)

    class Full:
        def __init__(self, listening: socket.socket) -> None:
            self.fileno = listening.fileno

        def accept(self) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

    with small(1, 0) as (theatre, memory), ThreadPoolExecutor(1) as pool:
        mailboxes = [Mailbox(memory, rank, k) for rank in range(theatre.plan.workers) for k in range(MAILBOXES)]
        door = TcpServer(memory, 0, mailboxes)
        gate, listening = door._gate, door._gate._listening
        gate._listening = Full(listening)  # type: ignore[assignment]
        coming = pool.submit(admission.enter, *listening.getsockname(), SECRET, timeout=PATIENCE)
        assert memory.wakeup.wait(lambda: gate.exhausted, PATIENCE)
        gate._listening = listening
        assert memory.wakeup.wait(lambda: bool(door._unknown), PATIENCE)
        coming.result(PATIENCE).close()
        door.close()


def test_a_server_that_follows_hears_the_order_from_where_it_is() -> None:
    with server(servers=2) as made:
        board = made.board
        for number in range(3):
            board.ring[number], board.ring_numbers[number] = number, 10 + number
        board.put("ordered", 3)
        connection = made.let_in()
        connection.sendall(bytes_of(HELLO, board.server_place(1), 0, 1))
        made.memory.wakeup.look()
        made.door.order(0)
        heard, size = connection.recv(1000), HEAD.size + 8
        found = [HEAD.unpack_from(heard, at)[2:6] for at in range(0, len(heard), size)]
        place = board.server_place(1)
        assert found == [(place, 1, 1, 11), (place, 2, 2, 12), (place, 0, 0, 10)]


@pytest.mark.parametrize("heard", [-1, -(1 << 63), 10])
def test_a_server_cannot_have_heard_less_than_the_ring_holds(heard: int) -> None:
    with server(servers=2) as made:
        made.board.put("ordered", RING + 20)
        assert not made.hear(bytes_of(HELLO, made.board.server_place(1), 0, heard), made.let_in())


# those that follow


def test_orders_are_taken_in_turn_and_those_of_a_generation_to_come_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with small(2, 0, servers=2) as (theatre, _):
        memory = opened(theatre, 2, theatre.board.server_place(1))
        with _followed(memory, monkeypatch) as (following, first):

            def order(position: int, entry: int, generation: int = 0) -> bytes:
                return bytes_of(ORDER, 3, position, entry, 100 + position, words=[generation])

            later = order(0, 6, generation=1) + order(1, MemberEvent.JOINED - 10, generation=1)
            assert said(
                order(0, 3) + order(0, 4) + order(2, 4) + order(1, MemberEvent.LEFT - 10) + later,
                first,
                memory.wakeup.look,
            )
            assert (following.ordered, theatre.board.ring[:2].tolist()) == (2, [3, MemberEvent.LEFT - 10])
            following.go_back(1)
            assert (following.ordered, theatre.board.ring[:2].tolist()) == (2, [6, MemberEvent.JOINED - 10])


@pytest.mark.parametrize(
    "data",
    [
        bytes_of(POST, 3, 0, 0, words=[0]),
        bytes_of(ORDER, 3, 0, 0),
        bytes_of(ORDER, 3, 0, 2 * MAILBOXES, words=[0]),
        bytes_of(ORDER, 3, 0, -1, words=[0]),
        bytes_of(ORDER, 3, 0, MemberEvent.LEFT - 20, words=[0]),
        bytes_of(ORDER, 3, 0, -(1 << 63), words=[0]),
        bytes_of(ORDER, 3, 0, 0, words=[0], pieces=[(0, 0)]),
        b"".join(bytes_of(ORDER, 3, number, 0, words=[1]) for number in range(RING + 1)),
    ],
)
def test_orders_that_nobody_gives_end_the_connection(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with small(2, 0, servers=2) as (theatre, _):
        memory = opened(theatre, 2, theatre.board.server_place(1))
        before = theatre.board.ring.tobytes()
        with _followed(memory, monkeypatch) as (following, first):
            assert not said(data, first, memory.wakeup.look)
            assert following.ordered == 0
            assert theatre.board.ring.tobytes() == before


class _followed:  # noqa: N801
    """A server that follows, and the first server's end of its connection."""

    def __init__(self, memory: RunMemory, monkeypatch: pytest.MonkeyPatch) -> None:
        self._near, far = socket.socketpair()
        self._near.setblocking(False)
        monkeypatch.setattr(tcp_client, "enter", lambda *_, **__: far)
        memory.board.server_port[0] = 1
        self._following = OrderFollower(memory, 1)
        self._following._reconnect()

    def __enter__(self) -> tuple[OrderFollower, socket.socket]:
        return self._following, self._near

    def __exit__(self, *_: object) -> None:
        self._following.close()
        self._near.close()
