"""Means over our own connections: the bits, members that are ahead or gone, and what a peer may not send."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from beds.commands import certificates
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from net_ends import PATIENCE, SECRET
from tcp_ends import LOCAL, PLAIN, Recorder, company, until

from paceline.errors import SchemeError
from paceline.network.means import mean_rooms
from paceline.network.means.group import HEAD, Broken, Header
from paceline.network.means.group_peer import EARLY, GIVEN, LIMITS, PART, START, SUM
from paceline.network.means.tcp_group import TcpGroup
from paceline.network.secure.admission import Refused, enter
from paceline.network.secure.channel import HEADER
from paceline.network.secure.tls import contexts
from paceline.state import Vector, mean_of


@pytest.fixture(scope="module", params=["plain", "tls"])
def tls(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return PLAIN if request.param == "plain" else contexts(certificates(tmp_path_factory.mktemp("tls")))


def shape(v: Vector) -> int:
    return v.numel() * 16


@pytest.mark.parametrize("size", [2, 3, 4])
def test_means_have_the_bits_of_a_sum_in_the_order_of_the_places(
    size: int, tls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of small and large vectors in turn, through one group, with equal and unequal weights."""
    monkeypatch.setattr(mean_rooms, "SMALL", 40_000)
    monkeypatch.setattr(mean_rooms, "SLICE", 30_000)
    lengths = [1, 5, 2499, 30_001, 700_001, 3, 700_001, 30_001, 1_000_000]
    torch.manual_seed(size)
    rounds = [[torch.randn(length) for _ in range(size)] for length in lengths for _ in range(3)]
    weights = [[1.0] * size if number % 2 else [1.0, 0.25, 3.0, 0.0][:size] for number in range(len(rounds))]

    def member(group: TcpGroup) -> list[Vector]:
        return [
            there.mean(group, vectors[group.place], Header(k, k, weights[k][group.place], shape=shape(vectors[0])))
            for k, vectors in enumerate(rounds)
        ]

    with company(size, tls) as there:
        groups = there.joined("0/all/1")
        for means in there.each(lambda place: member(groups[place])):
            for mean, vectors, weight in zip(means, rounds, weights, strict=True):
                assert torch.equal(mean, mean_of(vectors, weight))
        for group in groups:
            group.bury()


def test_a_member_may_be_ahead_of_another(tls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two have a mean and have begun the next, when the third has sent its part and has not read a byte."""
    monkeypatch.setattr(mean_rooms, "SMALL", 4000)
    monkeypatch.setattr(mean_rooms, "SLICE", 1000)
    with company(3, tls) as there:
        groups = there.joined("0/all/1")

        def start(place: int, v: Vector, index: int) -> Any:
            return groups[place].start(v, Header(index, index, 1.0, shape=shape(v)))

        def finish(place: int, v: Vector, exchange: Any) -> Vector:
            there.wait(place, exchange)
            if groups[place].small:
                return groups[place].small_mean(v, [1.0] * 3)
            there.wait(place, groups[place].start_second([1.0] * 3))
            return groups[place].large_mean(v).clone()

        for number, length in enumerate([3000, 10, 3000, 7000, 11, 12]):
            late = number % 3
            ahead = [place for place in range(3) if place != late]
            ones, twos = ([torch.randn(length) for _ in range(3)] for _ in range(2))
            first = [start(place, ones[place], 2 * number) for place in range(3)]
            tasks = [there.pool.submit(finish, place, ones[place], first[place]) for place in ahead]
            assert all(torch.equal(task.result(20.0), mean_of(ones)) for task in tasks if length < 100)
            second = {place: start(place, twos[place], 2 * number + 1) for place in ahead if length < 100}
            # of large vectors nobody has the mean without the third; of small ones the others are a whole mean ahead
            assert torch.equal(finish(late, ones[late], first[late]), mean_of(ones))
            assert all(torch.equal(task.result(20.0), mean_of(ones)) for task in tasks)
            second |= {place: start(place, twos[place], 2 * number + 1) for place in range(3) if place not in second}
            for mean in there.each(lambda place, twos=twos, second=second: finish(place, twos[place], second[place])):  # type: ignore[misc]
                assert torch.equal(mean, mean_of(twos))
        for group in groups:
            group.bury()


@pytest.mark.parametrize("size", [2, 3])
def test_a_vector_that_is_still_computed_travels_and_has_the_bits_of_a_whole_one(
    size: int, tls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members compute theirs from the end to the front, at a pace of their own; the last member begins with a whole
    vector. Nobody has the mean before all are at it."""
    monkeypatch.setattr(mean_rooms, "SLICE", 100_000)
    torch.manual_seed(size)
    length, cuts = 1_000_003, [900_000, 899_999, 333_333, 5, 0]
    rounds = [[torch.randn(length) for _ in range(size)] for _ in range(4)]

    def computed(vector: Vector) -> tuple[Vector, Any]:
        """A vector of other numbers, and what makes it final from an index on."""
        out = torch.full((length,), math.nan)
        return out, lambda low: out[low:].copy_(vector[low:])

    with company(size, tls) as there:
        groups = there.joined("0/all/1")

        def member(place: int) -> list[Vector]:
            group, means = groups[place], []
            for k, vectors in enumerate(rounds):
                header = Header(k, k, 1.0, shape=shape(vectors[place]))
                if place == size - 1:
                    means.append(there.mean(group, vectors[place], header))
                    continue
                out, write = computed(vectors[place])
                final = group.open_early(out, header)
                assert final is not None
                for low in cuts:
                    write(low)
                    final(low)
                means.append(there.finished(group, out, group.commit(header)))
            return means

        for means in there.each(member):
            for mean, vectors in zip(means, rounds, strict=True):
                assert torch.equal(mean, mean_of(vectors))
        for group in groups:
            group.bury()


def test_slices_of_a_vector_that_is_still_computed_arrive_before_its_end(
    tls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was added up of it is no mean as long as one member has not said that its vector is the mean's."""
    monkeypatch.setattr(mean_rooms, "SLICE", 100_000)
    vectors = [torch.randn(1_000_000) for _ in range(2)]
    with company(2, tls) as there:
        groups = there.joined("0/all/1")
        header = Header(1, 1, 1.0, shape=shape(vectors[0]))
        early = [group.open_early(v, header) for group, v in zip(groups, vectors, strict=True)]
        for final in early:
            assert final is not None
            final(500_000)
        until(lambda: all(group._added >= 9 for group in groups), "nobody waits, and half of it is added up")
        exchange = groups[0].commit(header)
        early[1](0)  # type: ignore[misc]
        there.wakeup[0].wait(lambda: groups[0]._added == len(groups[0]._used.mine), PATIENCE)
        assert not exchange.over
        groups[1].bury()
        with pytest.raises(Broken):
            there.wait(0, exchange)
        groups[0].bury()


def test_an_early_vector_of_another_mean_breaks_the_group_and_is_no_error_of_the_scheme() -> None:
    """One member has expected another mean than comes: a larger one, or the next but one."""
    for length, index in ((2_000_000, 1), (1_000_000, 2)):
        with company(2) as there:
            groups = there.joined("0/all/1")
            v = torch.zeros(length)
            assert groups[0].open_early(v, Header(index, 0, 1.0, shape=shape(v))) is not None
            v = torch.zeros(1_000_000)
            with pytest.raises(Broken):
                there.wait(1, groups[1].start(v, Header(1, 1, 1.0, shape=shape(v))))
            for group in groups:
                group.bury()


@pytest.mark.parametrize("count", [100, 2_000_000])
def test_a_mean_proceeds_while_its_worker_does_something_else(count: int, tls: Any) -> None:
    vectors = [torch.randn(count) for _ in range(2)]
    with company(2, tls) as there:
        groups = there.joined("0/all/1")
        started = []
        for group, v in zip(groups, vectors, strict=True):
            started.append(group.start(v, Header(1, 1, 1.0, shape=shape(v))))
            group.carry_on()
        until(lambda: all(one.over for one in started), "nobody waits, and it comes to its end")
        until(lambda: all(group.idle() for group in groups), "the second half too")
        for group, v in zip(groups, vectors, strict=True):
            mean = group.small_mean(v, [1.0, 1.0]) if group.small else group.large_mean(v)
            assert torch.equal(mean, mean_of(vectors))
            group.bury()


def test_a_tensor_of_one_member_goes_to_all_others(tls: Any) -> None:
    with company(3, tls) as there:
        groups = there.joined("0/all/1")
        for root, count in ((1, 3_000_001), (0, 7), (2, 0)):
            given_out = torch.randint(0, 256, (count,), dtype=torch.uint8)
            rooms = [given_out.clone() if place == root else torch.zeros_like(given_out) for place in range(3)]

            def member(place: int, root: int = root, rooms: Any = rooms) -> None:
                there.wait(place, groups[place].broadcast(rooms[place], root))

            there.each(member)
            assert all(torch.equal(room, given_out) for room in rooms)
        for group in groups:
            group.bury()


def test_a_member_that_leaves_breaks_the_mean_of_the_others_and_nothing_stays_open() -> None:
    with company(3) as there:
        opened = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        for attempt in range(5):
            left, right, third = there.joined(f"0/all/{attempt}")
            v = torch.zeros(1_000_000)
            waits = [group.start(v, Header(1, 1, 1.0, shape=shape(v))) for group in (left, right)]
            left.bury()
            third.bury()
            for place, exchange in enumerate(waits):
                with pytest.raises(Broken):
                    there.wait(place, exchange)
            right.bury()
        until(lambda: len(os.listdir("/proc/self/fd")) <= opened, "all connections are closed")  # noqa: PTH208


@pytest.mark.parametrize(("one", "other"), [(10, 100), (10, 1_000_000), (1_000_000, 2_000_000)])
def test_vectors_of_different_lengths_are_refused_by_both(one: int, other: int) -> None:
    with company(2) as there:
        groups = there.joined("0/all/1")
        vectors = [torch.ones(one), torch.ones(other)]

        def member(place: int) -> None:
            v = vectors[place]
            with pytest.raises(SchemeError, match="different lengths"):
                there.mean(groups[place], v, Header(1, 1, 1.0, shape=shape(v)))

        there.each(member)
        for group in groups:
            group.bury()


# what a peer may not send


def frame(kind: int, payload: bytes, claimed: int | None = None) -> bytes:
    return HEADER.pack(kind, 0, len(payload) if claimed is None else claimed) + payload


def member_and_raw_socket() -> tuple[TcpGroup, socket.socket, Any]:
    """One real member, and the other end of its connection."""
    from paceline.processes.memory.board import Board
    from paceline.processes.memory.wakeup import Wakeup

    server = socket.create_server((LOCAL, 0))
    raw = socket.create_connection(server.getsockname())
    connection, _ = server.accept()
    server.close()
    board = Board.create(2, 0)
    ends = Wakeup.create(board.roles)
    wakeup = Wakeup(board, ends, 0)

    def close() -> None:
        group.bury()
        raw.close()
        for end in (*ends, board.descriptor):
            os.close(end)

    group = TcpGroup(0, 2, {1: connection}, watch=wakeup, ring=lambda: None)
    group.test_bells = wakeup  # type: ignore[attr-defined]
    return group, raw, close


def refused(group: TcpGroup, exchange: Any) -> None:
    wakeup = group.test_bells  # type: ignore[attr-defined]
    assert wakeup.wait(lambda: exchange.over, 20.0)
    with pytest.raises((Broken, SchemeError)):
        exchange.finish()


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(frame(99, b"x"), id="a kind that there is not"),
        pytest.param(frame(START, b"", 1 << 40), id="a length that no memory holds"),
        pytest.param(frame(START, b"short"), id="no whole header"),
        pytest.param(frame(START, b"\0" * HEAD) + frame(PART, b"x" * 17), id="a slice of another length"),
        pytest.param(frame(START, b"\0" * HEAD) + frame(SUM, b""), id="an empty slice"),
        pytest.param(frame(EARLY, b"\0" * HEAD) * 2, id="two early headers"),
        pytest.param(frame(START, b"\0" * HEAD) * 2, id="two headers"),
        pytest.param(frame(START, b"\0" * HEAD) + frame(EARLY, b"\0" * HEAD), id="an early header that is late"),
        pytest.param(
            frame(EARLY, Header(0, 0, 2.0).packed()) + frame(START, Header(0, 0, 1.0).packed()), id="another weight"
        ),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n" * 10, id="another protocol"),
        pytest.param(b"", id="nothing, and an end"),
    ],
)
def test_a_peer_that_sends_what_it_may_not_ends_the_group_and_nothing_else(sent: bytes) -> None:
    group, raw, close = member_and_raw_socket()
    try:
        v = torch.zeros(1_000_000)
        exchange = group.start(v, Header(0, 0, 1.0))
        raw.sendall(sent)
        raw.shutdown(socket.SHUT_WR)
        refused(group, exchange)
    finally:
        close()


@settings(max_examples=150, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=some.binary(min_size=0, max_size=400), cut=some.integers(0, 400))
def test_bytes_that_nobody_would_send_never_bring_a_mean_about(data: bytes, cut: int) -> None:
    """Frames of known and unknown kinds with drawn lengths and contents, after which the connection ends."""
    group, raw, close = member_and_raw_socket()
    try:
        exchange = group.start(torch.zeros(1_000_000), Header(0, 0, 1.0))
        words = [data[at : at + 4] for at in range(0, len(data) - 3, 4)]
        stream = b"".join(frame(word[0] % 7, word[1:] * (word[1] % 30), word[2] % 200 or None) for word in words)
        raw.sendall(stream[: max(len(stream) - cut, 0)] or data)
        raw.shutdown(socket.SHUT_WR)
        refused(group, exchange)
    finally:
        close()


def test_a_peer_that_floods_ahead_of_its_turn_is_not_read() -> None:
    """It sends mean after mean while this worker computes, or waits for somebody else: memory is bounded."""
    group, raw, close = member_and_raw_socket()
    raw.settimeout(0.2)
    tracemalloc.start()
    try:
        v = torch.zeros(1000)
        exchange = group.start(v, Header(0, 0, 1.0, shape=shape(v)))
        start = frame(START, Header(0, 0, 1.0, shape=shape(v)).packed() + v.numpy().tobytes())
        sent = 0
        with contextlib.suppress(TimeoutError):  # at some point nobody takes it any more
            while sent < 1 << 30:
                sent += raw.send(start * 100)
                group.test_bells.look()  # type: ignore[attr-defined]
        assert sent < 1 << 30
        assert exchange.over
        exchange.finish()
        assert tracemalloc.get_traced_memory()[0] < 8 << 20
    finally:
        tracemalloc.stop()
        close()


def test_the_limits_of_messages_are_those_of_small_vectors_and_slices() -> None:
    assert LIMITS == {
        START: HEAD + mean_rooms.SMALL,
        PART: mean_rooms.SLICE,
        SUM: mean_rooms.SLICE,
        GIVEN: mean_rooms.SLICE,
        EARLY: HEAD,
    }


# who may connect, and who can read along


def test_with_tls_no_number_of_a_vector_can_be_read_on_the_way(tmp_path: Path) -> None:
    """All that goes between two members passes a recorder: without TLS it holds the vectors, with TLS it does not."""
    pattern = struct.pack("<f", 1.2345678) * 8
    for encrypted in (False, True):
        with company(2, contexts(certificates(tmp_path)) if encrypted else PLAIN) as there:
            first = there.listeners[0]
            recorder = Recorder((LOCAL, first.port))
            try:
                first.port = recorder.port  # which is what the others are told
                groups = there.joined("0/all/1")
                for count in (100, 2_000_000):
                    v = torch.full((count,), 1.2345678)

                    def member(place: int, v: Vector = v, groups: list[TcpGroup] = groups) -> Vector:
                        return there.mean(groups[place], v, Header(v.numel(), 1, 1.0, shape=shape(v)))

                    assert all(torch.equal(mean, v) for mean in there.each(member))
                for group in groups:
                    group.bury()
            finally:
                recorder.close()
        assert len(recorder.heard) > 8_000_000
        assert (pattern in recorder.heard) is not encrypted


def test_strangers_are_turned_away_while_a_group_meets_and_means_are_taken(tls: Any) -> None:
    """Scans of the port, HTTP, another secret, half a handshake, and many at once: none of them does any harm."""
    with company(2, tls) as there:
        place = LOCAL, there.listeners[0].port
        over = threading.Event()

        let_in: list[socket.socket] = []

        def attack() -> None:
            while not over.is_set():
                for said in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(300), b"paceline" + bytes(20), b"\x16\x03\x01"):
                    with socket.create_connection(place, timeout=5.0) as stranger:
                        stranger.sendall(said)
                with contextlib.suppress(Refused, OSError):  # an OSError: the door was crowded
                    let_in.append(enter(*place, bytes(32), timeout=5.0, tls=tls[1]))

        attacker = threading.Thread(target=attack)
        silent = [socket.create_connection(place) for _ in range(100)]  # more than may knock at once
        attacker.start()
        try:
            v = torch.arange(1000.0)
            for attempt in range(10):
                groups = there.joined(f"0/all/{attempt}")
                for mean in there.each(
                    lambda place, groups=groups: there.mean(groups[place], v, Header(1, 1, 1.0, shape=shape(v)))  # type: ignore[misc]
                ):
                    assert torch.equal(mean, v)
                for group in groups:
                    group.bury()
        finally:
            over.set()
            attacker.join()
            for one in silent:
                one.close()
        assert not let_in
        assert not there.listeners[0]._named
        assert any("turned" in line for line in there.lines)
        assert not any(SECRET.hex() in line for line in there.lines)
