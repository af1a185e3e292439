"""Whole messages, in order, in bounded memory, over plain sockets and TLS."""

from __future__ import annotations

import contextlib
import json
import math
import select
import socket
import ssl
import time
import tracemalloc
from array import array
from collections.abc import Iterator

import pytest
from beds.commands import certificates
from net_ends import PATIENCE, Door

from paceline.network.secure.channel import DEEPEST, HEADER, LARGEST_JSON, Channel, Closed, ProtocolError, plain
from paceline.network.secure.tls import contexts

SMALL, BULK, JSON = 1, 2, 3
LIMITS = {SMALL: 100, BULK: 64 << 20, JSON: 1000}
Pair = tuple[socket.socket, socket.socket]
Message = tuple[int, bytearray]


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    return contexts(certificates(tmp_path_factory.mktemp("certificates")))


@pytest.fixture(params=["plain", "tls"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    server, client = request.getfixturevalue("certified") if request.param == "tls" else (None, None)
    with Door(tls=server) as door, door.let_in(tls=client) as connection:
        yield connection, door.admitted[0]


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Channel]]:
    """A socket into which anything can be written, and the channel at its other end."""
    near, far = socket.socketpair()
    near.settimeout(PATIENCE)
    channel = Channel(far, limits=LIMITS)
    with near:
        yield near, channel
    channel.close()


def channels(pair: Pair, **options: int) -> tuple[Channel, Channel]:
    return Channel(pair[0], limits=LIMITS, **options), Channel(pair[1], limits=LIMITS, **options)


def awaited(channel: Channel, count: int, sender: Channel | None = None) -> list[Message]:
    """So many messages; the sender goes on sending meanwhile."""
    found: list[Message] = []
    end = time.monotonic() + PATIENCE
    while len(found) < count:
        assert time.monotonic() < end, f"{len(found)} of {count} messages came"
        if sender is not None:
            sender.flush()
        select.select([channel], [], [], 0.01)
        found += channel.receive()
    return found


def test_messages_can_be_received_into_memory_that_is_there(pair: Pair) -> None:
    """Large and small ones, in turn with others; what is refused there ends the reading."""
    sent = [bytes([number]) * size for number, size in enumerate([5_000_000, 3, 70_000, 65_536, 1, 200_000])]
    rooms: list[memoryview | None] = []

    def room(kind: int, length: int) -> memoryview | None:
        if length == 99:
            raise ProtocolError("not that one")
        rooms.append(memoryview(bytearray(length)) if len(rooms) % 3 else None)
        return rooms[-1]

    sender, receiver = Channel(pair[0], limits=LIMITS), Channel(pair[1], limits=LIMITS, room=room)
    for one in sent:
        sender.send(BULK, one)
    found = awaited(receiver, len(sent), sender)
    for one, (kind, payload), place in zip(sent, found, rooms, strict=True):
        assert kind == BULK
        assert bytes(payload if place is None else place) == one
        assert place is None or not payload
    sender.send(SMALL, b"x" * 99)
    with pytest.raises(ProtocolError, match="not that one"):
        awaited(receiver, 1, sender)


def closes(channel: Channel, match: str = "closed|broken") -> list[Message]:
    """What comes before the other side has closed."""
    found: list[Message] = []

    def listen() -> None:
        while True:
            select.select([channel], [], [], PATIENCE)
            found.extend(channel.receive())

    with pytest.raises(Closed, match=match):
        listen()
    return found


def frame(kind: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return HEADER.pack(kind, flags, len(payload)) + payload


def test_messages_arrive_whole_and_in_order(pair: Pair) -> None:
    near, far = channels(pair)
    assert far.receive() == []
    near.send(SMALL, b"one")
    near.send(SMALL)
    near.send(SMALL, b"th", bytearray(b"re"), memoryview(b"e"), b"")
    near.send_json(JSON, {"loss": [0.5, None], "wörter": "grüße"})
    *three, last = awaited(far, 4)
    assert three == [(SMALL, b"one"), (SMALL, b""), (SMALL, b"three")]
    assert plain(last[1]) == {"loss": [0.5, None], "wörter": "grüße"}
    far.send(SMALL, b"and back")
    assert awaited(near, 1) == [(SMALL, b"and back")]
    assert near.pending == far.pending == 0
    assert far.fileno() == pair[1].fileno()


def test_large_parts_cross_without_being_joined(pair: Pair) -> None:
    near, far = channels(pair)
    numbers = array("d", range(500_000))
    large = bytes(range(256)) * 40_000
    near.send(BULK, b"head", memoryview(numbers), large, large, b"tail", memoryview(large)[:5000])
    assert near.pending > 0  # no socket takes that much at once, and nobody waited
    near.send(SMALL, b"behind")
    first, second = awaited(far, 2, near)
    assert first == (BULK, b"head" + numbers.tobytes() + large + large + b"tail" + large[:5000])
    assert second == (SMALL, b"behind")
    assert near.pending == 0


def test_large_parts_are_not_copied_to_be_sent(raw: tuple[socket.socket, Channel]) -> None:
    large = bytearray(32 << 20)
    tracemalloc.start()
    try:
        raw[1].send(BULK, large, large)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        assert raw[1].pending > 32 << 20
    finally:
        tracemalloc.stop()


def test_both_sides_send_at_once(pair: Pair) -> None:
    near, far = channels(pair)
    large = bytes(8 << 20)
    near.send(BULK, large)
    far.send(BULK, large)
    found: dict[Channel, list[Message]] = {near: [], far: []}
    end = time.monotonic() + PATIENCE
    while not all(found.values()):
        assert time.monotonic() < end
        for channel, messages in found.items():
            channel.flush()
            messages += channel.receive()
    assert found == {near: [(BULK, large)], far: [(BULK, large)]}


def test_many_small_messages(pair: Pair) -> None:
    near, far = channels(pair)
    for number in range(5000):
        near.send(SMALL, number.to_bytes(4, "little"))
    found = awaited(far, 5000, near)
    assert [int.from_bytes(payload, "little") for _, payload in found] == list(range(5000))


def test_a_flood_is_taken_in_parts(raw: tuple[socket.socket, Channel]) -> None:
    """A sender without end gets no more than its share of one call, and no message is lost."""
    near, channel = raw
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
    near.setblocking(False)
    flood = memoryview(frame(SMALL, bytes(100)) * 100_000)
    found, turns = 0, 0
    while found < 100_000:
        try:
            while flood:
                flood = flood[near.send(flood) :]
        except BlockingIOError:
            pass
        now = len(channel.receive())
        assert now * 112 <= (1 << 20) + (1 << 16) + 112
        found, turns = found + now, turns + 1
    assert turns > 5


def test_half_a_message_waits_for_the_rest(raw: tuple[socket.socket, Channel]) -> None:
    near, channel = raw
    words = frame(SMALL, b"slowly") + frame(SMALL) + frame(SMALL, b"but surely")
    found = []
    for at in range(len(words)):
        near.sendall(words[at : at + 1])
        found += channel.receive()
    assert found == [(SMALL, b"slowly"), (SMALL, b""), (SMALL, b"but surely")]


@pytest.mark.parametrize("size", [0, 1, 65_523, 65_524, 65_525, 131_072, 1_048_576, 3_000_001])
def test_sizes_around_the_buffer(raw: tuple[socket.socket, Channel], size: int) -> None:
    near, channel = raw
    payload = bytes(range(256)) * (size // 256) + bytes(size % 256)
    words = memoryview(frame(BULK, payload) + frame(SMALL, b"x"))
    near.setblocking(False)
    found = []
    while len(found) < 2:
        with contextlib.suppress(BlockingIOError):
            words = words[near.send(words[:100_000]) :]
        found += channel.receive()
    assert found == [(BULK, payload), (SMALL, b"x")]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (frame(7, b"x"), r"kind 7 came in; known are 1, 2, 3"),
        (frame(SMALL, b"x", flags=1), r"flags \(0x1\)"),
        (HEADER.pack(SMALL, 0, 101), "claims 101 bytes; 100 are allowed"),
        (HEADER.pack(BULK, 0, 1 << 40), "claims 1,099,511,627,776 bytes"),
        (HEADER.pack(BULK, 0, (1 << 64) - 1), "are allowed"),
        (b"GET / HTTP/1.1\r\n", "kind"),
    ],
)
def test_what_is_no_message_closes_the_channel(raw: tuple[socket.socket, Channel], words: bytes, match: str) -> None:
    near, channel = raw
    near.sendall(frame(SMALL, b"a good one"))
    assert channel.receive() == [(SMALL, b"a good one")]
    near.sendall(words)
    with pytest.raises(ProtocolError, match=match):
        channel.receive()
    assert channel.fileno() == -1
    with pytest.raises(Closed):
        channel.receive()
    with pytest.raises(Closed):
        channel.send(SMALL)


def test_an_announcement_takes_no_memory(raw: tuple[socket.socket, Channel]) -> None:
    near, channel = raw
    near.sendall(HEADER.pack(BULK, 0, 1 << 40))
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            channel.receive()
        assert tracemalloc.get_traced_memory()[1] < 50_000
    finally:
        tracemalloc.stop()


def test_the_end_comes_behind_the_last_message(pair: Pair) -> None:
    near, far = channels(pair)
    near.send(SMALL, b"last words")
    assert near.flush(PATIENCE)
    near.close()
    near.close()
    assert closes(far, "the other side has closed$") == [(SMALL, b"last words")]
    with pytest.raises(Closed):
        far.receive()


def test_an_end_inside_a_message_is_no_message(raw: tuple[socket.socket, Channel]) -> None:
    near, channel = raw
    near.sendall(frame(SMALL, b"whole") + frame(SMALL, b"torn")[:-1])
    near.close()
    assert closes(channel, "closed inside a message") == [(SMALL, b"whole")]


def test_a_broken_connection_can_still_be_read(pair: Pair) -> None:
    """Who hears that its words do not arrive may still read why."""
    near, far = channels(pair)
    far.send(SMALL, b"goodbye")
    far.close()
    select.select([near], [], [], PATIENCE)

    def ask() -> None:
        for _ in range(1000):
            near.send(SMALL, b"are you there?")

    with pytest.raises(Closed, match="broken"):
        ask()
    assert near.pending == 0
    with pytest.raises(Closed):
        near.flush()
    assert closes(near) == [(SMALL, b"goodbye")]


def test_what_nobody_takes_is_bounded(pair: Pair) -> None:
    near, _ = channels(pair, most_pending=16 << 20)
    large = bytes(4 << 20)

    def send_on() -> None:
        for _ in range(20):
            near.send(BULK, large)

    with pytest.raises(ProtocolError, match=r"does not take .*: [\d,]+ bytes wait, 16,777,216 are allowed"):
        send_on()
    assert near.pending == 0
    assert near.fileno() == -1


def test_flush_waits_no_longer_than_it_is_told(pair: Pair) -> None:
    near, far = channels(pair)
    assert near.flush(0)
    near.send(BULK, bytes(32 << 20))
    began = time.monotonic()
    assert not near.flush()
    assert not near.flush(0.05)
    assert 0.05 <= time.monotonic() - began < PATIENCE
    awaited(far, 1, near)
    assert near.flush(20)


def test_a_closed_channel_says_so(pair: Pair) -> None:
    near, _ = channels(pair)
    near.send(BULK, bytes(32 << 20))
    near.close()
    assert near.pending == 0
    for deed in (near.receive, near.flush, lambda: near.send(SMALL)):
        with pytest.raises(Closed, match="this side has closed"):
            deed()


def test_bytes_that_are_not_of_this_tls_connection(certified: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    server, client = certified
    with Door(tls=server) as door, door.let_in(tls=client) as connection:
        channel = Channel(door.admitted[0], limits=LIMITS)
        under = socket.socket(fileno=connection.detach())
        with under:
            under.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
            select.select([channel], [], [], PATIENCE)
            with pytest.raises(ProtocolError, match="not TLS of this connection"):
                channel.receive()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        b"nonsense",
        b"\xff\xfe",
        b'{"a": 1} {"b": 2}',
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 100_000,
        b"[" * (DEEPEST + 1) + b"]" * (DEEPEST + 1),
        b'{"a":' * DEEPEST + b"[]" + b"}" * DEEPEST,
        b"9" * 5000,
        '"utf-16"'.encode("utf-16"),
    ],
    ids=range(11),
)
def test_what_is_no_json(payload: bytes) -> None:
    with pytest.raises(ProtocolError) as refused:
        plain(payload)
    assert len(str(refused.value)) < 200


def test_json_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    deep: object = "bottom"
    for _ in range(DEEPEST):
        deep = [deep]
    wide = {"rows": [[[]] * 10] * 100, "brackets": "[{" * 100}
    for value in (None, True, 1.5, "grüße", [1, [2]], deep, wide):
        assert plain(json.dumps(value).encode()) == value
        assert plain(memoryview(bytearray(json.dumps(value).encode()))) == value
    assert math.isnan(plain(b"NaN"))
    with pytest.raises(ProtocolError, match="bytes of JSON"):
        plain(bytes(LARGEST_JSON + 1))
