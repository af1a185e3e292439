"""Messages between nodes: whole ones or none, into the memory where they belong and nowhere else."""

from __future__ import annotations

import socket
import threading
from array import array
from typing import Any

import pytest
import torch
from remote_ends import Pair, bytes_of, segment

from paceline.network.calls.tcp_connection import EARLY, FRONT, HEAD, HELLO, ORDER, PIECES, POST, REPLY, Message
from paceline.network.secure.channel import Closed, ProtocolError
from paceline.processes.memory.byte_ranges import Pieces, ShardRange, WritableRanges, of_tensors, of_words
from paceline.processes.memory.call_codec import (
    DTYPES,
    MOST,
    NONE,
    REAL,
    TENSOR,
    TEXT,
    TRUTH,
    TUPLE,
    WHOLE,
    check,
    decode,
    encode,
)


def message(kind: int = POST, words: tuple[int, ...] = ()) -> Message:
    return Message(kind, 3, -(1 << 62), 1 << 62, -1, array("q", words))


# whole messages


@pytest.mark.parametrize("pieces", [(), ((64, 8),), ((128, 100), (0, 0), (1024, 5000)), ((0, 0),), ((8, 1), (9, 1))])
@pytest.mark.parametrize("words", [(), (1, -(1 << 63), (1 << 63) - 1)])
def test_a_message_comes_out_as_it_went_in(words: tuple[int, ...], pieces: tuple[tuple[int, int], ...]) -> None:
    with Pair() as pair:
        pair.segments[0].bytes.copy_(torch.randint(0, 256, (1 << 14,), dtype=torch.uint8))
        pair.near.send(message(words=words), pieces)
        assert pair.pull() == [message(words=words)]
        expected = torch.zeros(1 << 14, dtype=torch.uint8)
        for offset, size in pieces:
            expected[offset : offset + size] = pair.segments[0].bytes[offset : offset + size]
        assert torch.equal(pair.segments[1].bytes, expected)


def test_messages_may_be_torn_at_every_byte() -> None:
    data = bytes_of(POST, 1, 2, 3, 4, words=[5, 6], pieces=[(64, 10), (0, 0), (200, 3)], data=b"0123456789abc")
    for cut in range(1, len(data)):
        with Pair() as pair:
            pair.raw.sendall(data[:cut])
            assert pair.pull() == []
            pair.raw.sendall(data[cut:])
            assert pair.pull() == [Message(POST, 1, 2, 3, 4, array("q", [5, 6]))]
            assert bytes(pair.segments[1].memory[64:74]) == b"0123456789"
            assert bytes(pair.segments[1].memory[200:203]) == b"abc"


def test_messages_come_whole_byte_by_byte_or_together() -> None:
    data = bytes_of(HELLO, 1) + bytes_of(REPLY, words=[7], pieces=[(0, 2)], data=b"xy") + bytes_of(ORDER, 2, words=[1])
    with Pair() as pair:
        counts = []
        for byte in data:
            pair.raw.sendall(bytes([byte]))
            counts.append(len(pair.pull()))
        assert [one.kind for one in pair.found] == [HELLO, REPLY, ORDER]
        assert counts.index(1) == HEAD.size - 1  # as soon as its last byte is there
    with Pair() as pair:
        pair.raw.sendall(data)
        found: list[Message] = []
        pair.far.pull(found.append)
        assert [one.kind for one in found] == [HELLO, REPLY, ORDER]  # small ones have come in one piece
        assert bytes(pair.segments[1].memory[:2]) == b"xy"


def test_larger_messages_come_one_at_a_time() -> None:
    """Others that wait for this thread have their turn in between."""
    with Pair() as pair:
        many = [
            bytes_of(POST, one, words=range(FRONT // 8), pieces=[(64 * one, 64)], data=bytes(64)) for one in range(3)
        ]
        many += [bytes_of(POST, 3, words=range(200)), bytes_of(POST, 4, pieces=[(0, 2000)], data=bytes(2000))]
        pair.raw.sendall(b"".join(many))
        found: list[Message] = []
        for count in range(1, 6):
            pair.far.pull(found.append)
            assert [one.mailbox for one in found] == list(range(count))
        assert len(pair.far._front) == FRONT  # no more than needed is kept


def test_who_looks_at_a_message_may_refuse_it_or_say_where_its_pieces_go() -> None:
    data = bytes_of(POST, 1, words=[5], pieces=[(0, 4), (100, 3000)], data=b"abcd" + b"x" * 3000)
    with Pair() as pair:
        pair.raw.sendall(data)
        own, found = bytearray(3004), []

        def look(message: Message, pieces: Pieces) -> list[memoryview]:
            found.append((message.words.tolist(), list(pieces)))
            return [memoryview(own)[3000:], memoryview(own)[:3000]]

        pair.far.pull(pair.found.append, look)
        assert found == [([5], [(0, 4), (100, 3000)])]
        assert own == b"x" * 3000 + b"abcd"
        assert pair.far.elsewhere
        assert not pair.segments[1].bytes.any()
    with Pair() as pair:
        pair.raw.sendall(data)

        def refuse(message: Message, _: Pieces) -> None:
            raise ProtocolError(f"not {message.mailbox}")

        with pytest.raises(ProtocolError, match="not 1"):
            pair.far.pull(pair.found.append, refuse)
        assert not pair.segments[1].bytes.any()


def test_what_is_to_be_sent_may_move() -> None:
    """Of one lane's message; what has gone has gone, and others stay where they are."""
    with Pair() as pair:
        pair.raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
        memory = pair.segments[0].memory
        memory[:4000], memory[4000:8000] = b"a" * 4000, b"b" * 4000
        while not pair.near.pending:
            pair.near.send(Message(POST), [(8000, 4000)])  # until the socket takes no more
        for mailbox, place in ((1, 8000), (2, 12_000)):
            pair.near.send(Message(REPLY, mailbox), [(place, 4000)], [(0, 4000)])
        pair.near.move(1, 0, 4000, 4000)
        while pair.near.pending:
            pair.near.push()
            pair.pull()
        pair.pull()
        assert bytes(pair.segments[1].memory[8000:16_000]) == b"b" * 4000 + b"a" * 4000


def test_what_the_socket_does_not_take_goes_later_and_in_order() -> None:
    with Pair() as pair:
        pair.raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
        pair.segments[0].bytes.copy_(torch.randint(0, 256, (1 << 14,), dtype=torch.uint8))
        for number in range(50):
            pair.near.send(Message(POST, number), [(0, 1 << 14)])
        assert pair.near.pending
        assert pair.near.events != pair.far.events  # it waits for room
        while pair.near.pending:
            pair.pull()
            pair.near.push()
        pair.pull()
        assert [one.mailbox for one in pair.found] == list(range(50))
        assert torch.equal(pair.segments[0].bytes, pair.segments[1].bytes)


def test_data_may_be_other_than_what_lies_there() -> None:
    with Pair() as pair:
        pieces, data = [(0, 3), (5, 0), (10, 2)], [memoryview(b"abc"), memoryview(b""), memoryview(b"de")]
        pair.near.send(Message(REPLY), pieces, data)
        assert not pair.near.pending
        pair.pull()
        assert bytes(pair.segments[1].memory[:12]) == b"abc" + bytes(7) + b"de"


def test_two_threads_may_send() -> None:
    """A courier sends what its worker has left behind; no message is torn by another."""
    with Pair() as pair:
        pair.raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)

        def send(mailbox: int) -> None:
            for number in range(200):
                pair.near.send(Message(POST, mailbox, number, words=array("q", range(20))), [(0, 300)])

        threads = [threading.Thread(target=send, args=(mailbox,)) for mailbox in range(2)]
        for one in threads:
            one.start()
        while any(one.is_alive() for one in threads) or pair.near.pending:
            pair.near.push()
            pair.pull()
        pair.pull()
        for mailbox in range(2):
            assert [one.number for one in pair.found if one.mailbox == mailbox] == list(range(200))


# ends


@pytest.mark.parametrize("cut", [0, 1, HEAD.size - 1, HEAD.size, HEAD.size + 5, -1])
def test_an_end_inside_a_message_is_an_end(cut: int) -> None:
    data = bytes_of(POST, words=[1], pieces=[(0, 4)], data=b"1234")
    with Pair() as pair:
        pair.raw.sendall(data[:cut] if cut >= 0 else data[:-1])
        pair.raw.shutdown(socket.SHUT_WR)
        with pytest.raises(Closed, match="closed"):
            pair.pull()
        assert pair.found == []


def test_what_was_whole_before_the_end_is_heard() -> None:
    with Pair() as pair:
        pair.near.send(Message(HELLO, 1))
        pair.near.close()
        with pytest.raises(Closed):
            pair.pull()
        assert [one.mailbox for one in pair.found] == [1]


def test_sending_to_who_is_gone_says_so() -> None:
    with Pair() as pair:
        pair.far.close()
        with pytest.raises(Closed):
            pair.near.send(Message(HELLO))


# what is refused


@pytest.mark.parametrize(
    "head",
    [
        bytes_of(0),
        bytes_of(EARLY + 1),
        bytes_of(0xFFFF),
        bytes_of(POST, zero=1),
        bytes_of(POST, counts=(MOST + 33, 0)),
        bytes_of(POST, counts=(0xFFFFFFFF, 0)),
        bytes_of(POST, counts=(0, PIECES + 1)),
        bytes_of(POST, counts=(0, 0xFFFFFFFF)),
    ],
)
def test_a_head_that_nobody_writes_is_refused_before_memory_is_taken(head: bytes) -> None:
    with Pair() as pair:
        pair.raw.sendall(head)
        with pytest.raises(ProtocolError, match="a message of kind"):
            pair.pull()
        assert len(pair.far._front) == FRONT


@pytest.mark.parametrize(
    "piece",
    [(-8, 8), (0, -1), (0, 101), (99, 2), (100, 1), (1 << 62, 1 << 62), (-1 << 63, 8), (150, 10), (0, (1 << 63) - 1)],
)
def test_a_piece_that_is_not_the_senders_is_refused_before_a_byte_is_written(piece: tuple[int, int]) -> None:
    with Pair(((0, 100), (200, 50))) as pair:
        pair.raw.sendall(bytes_of(POST, pieces=[(0, 4), piece], data=b"evil" * 30))
        with pytest.raises(ProtocolError, match="not the sender's"):
            pair.pull()
        assert not pair.segments[1].bytes.any()


def test_pieces_that_were_allowed_once_are_refused_when_the_areas_have_changed() -> None:
    with Pair(((0, 100),)) as pair:
        for _ in range(2):
            pair.raw.sendall(bytes_of(POST, pieces=[(0, 4)], data=b"good"))
        assert len(pair.pull()) == 2
        pair.far.allow(WritableRanges([(200, 50)]))
        pair.raw.sendall(bytes_of(POST, pieces=[(0, 4)], data=b"evil"))
        with pytest.raises(ProtocolError, match="not the sender's"):
            pair.pull()
        assert bytes(pair.segments[1].memory[:4]) == b"good"


def test_areas() -> None:
    areas = WritableRanges([(200, 50), (0, 100), (250, 10)])
    allowed = [(0, 0), (0, 100), (99, 1), (100, 0), (200, 50), (250, 10), (249, 1)]
    refused = [(-1, 1), (0, 101), (100, 1), (150, 0), (199, 2), (249, 2), (261, 0), (0, -1), (10, -5)]
    assert [piece for piece in allowed if piece not in areas] == []
    assert [piece for piece in refused if piece in areas] == []
    assert (0, 0) not in WritableRanges(())


# pieces

PARTS = (ShardRange(0, 2, 7, True), ShardRange(2, 4, 7, False), ShardRange(4, 7, 7, False))


def words_of(*values: Any) -> array[int]:
    """Tensors lie at 1000, 2000, …"""
    places = iter(range(1000, 100_000, 1000))
    return encode(values, lambda _: next(places))


def test_vectors_are_cut_among_servers_and_everything_else_is_not() -> None:
    words = words_of(torch.zeros(7), 5, (torch.zeros(3), torch.zeros(7, dtype=torch.float64)), torch.zeros(()))
    assert [of_words(words, part) for part in PARTS] == [
        [(1000, 8), (2000, 12), (3000, 16), (4000, 4)],
        [(1008, 8), (2000, 12), (3016, 16), (4000, 4)],
        [(1016, 12), (2000, 12), (3032, 24), (4000, 4)],
    ]


def test_matrices_are_cut_row_by_row() -> None:
    words = words_of(torch.zeros(2, 7))
    assert [of_words(words, part) for part in PARTS] == [
        [(1000, 8), (1028, 8)],
        [(1008, 8), (1036, 8)],
        [(1016, 12), (1044, 12)],
    ]


def test_one_server_has_all() -> None:
    whole = ShardRange(0, 7, 7, True)
    assert whole.whole
    assert of_words(words_of(torch.zeros(2, 7), torch.zeros(0), "text", None), whole) == [(1000, 56), (2000, 0)]


def test_the_parts_of_all_servers_are_the_whole() -> None:
    words = words_of(torch.zeros(3, 2, 7))
    covered = [byte for part in PARTS for at, size in of_words(words, part) for byte in range(at, at + size)]
    assert sorted(covered) == list(range(1000, 1000 + 3 * 2 * 7 * 4))


def test_tensors_in_memory_are_runs_of_bytes() -> None:
    memory = segment()
    matrix = memory.tensor(256, torch.float32, (3, 4))
    empty = memory.tensor(0, torch.float32, (0,))
    assert of_tensors(memory, [matrix, empty]) == [(256, 48)]
    assert of_tensors(memory, [matrix[:, 1:3]]) == [(260, 8), (276, 8), (292, 8)]


# words that a peer has chosen


def test_tuples_inside_each_other_are_read_as_deep_as_words_can_say_it() -> None:
    words = array("q", [*[1, TUPLE] * 239, 0])
    assert check(words, lambda *_: True) == 1
    value = decode(words.tolist(), lambda *_: torch.empty(0))
    while value:
        (value,) = value
    assert value == ()


def test_whatever_is_encoded_is_accepted() -> None:
    for value in (1, 0.5, True, None, "ünï", "", "x" * 1500, (), ((1, ("a", (None,))), 2), torch.zeros(0, 3)):
        for values in ((value,), (value, value), ()):
            assert check(encode(values, lambda _: 64), lambda *_: True) == len(values)
    seen = []
    for dtype in DTYPES:
        check(encode((torch.zeros(2, 3, dtype=dtype),), lambda _: 64), lambda at, size: not seen.append((at, size)))
    assert seen == [(64, 6 * dtype.itemsize) for dtype in DTYPES]


@pytest.mark.parametrize(
    "words",
    [
        [],
        [1],
        [2, NONE],
        [0, NONE],
        [-1],
        [1 << 62, NONE],
        [1, 7, 0],
        [1, -1],
        [1, WHOLE],
        [1, REAL],
        [1, TRUTH],
        [1, TEXT, 9, 0],
        [1, TEXT, -1],
        [1, TEXT, 8, -1],
        [1, TEXT, 1 << 40],
        [1, TENSOR, 0, 64],
        [1, TENSOR, len(DTYPES), 64, 0],
        [1, TENSOR, -1, 64, 0],
        [1, TENSOR, 0, 64, -1],
        [1, TENSOR, 0, 64, 65, *[1] * 65],
        [1, TENSOR, 0, 64, 1 << 40],
        [1, TENSOR, 0, 64, 2, 3],
        [1, TENSOR, 0, 64, 1, -1],
        [1, TENSOR, 0, 64, 2, -1, -5],
        [1, TENSOR, 0, 66, 1, 1],
        [1, TENSOR, 0, 0, 1, 1],
        [1, TENSOR, 0, 64, 1, 100],
        [1, TENSOR, 0, 64, 2, 1 << 62, 1 << 62],
        [1, TENSOR, 0, 64, 3, 0, 1 << 62, 1 << 62],
        [1, TUPLE, 1 << 40],
        [MOST, *[NONE] * MOST],
    ],
)
def test_words_that_mean_nothing_are_refused(words: list[int]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each says something else
        check(array("q", words), lambda offset, size: offset >= 64 and offset + size <= 128)
