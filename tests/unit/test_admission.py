"""Who comes in, and what everybody else costs: a closed connection and a line."""

from __future__ import annotations

import contextlib
import hmac
import os
import resource
import select
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from net_ends import PATIENCE, SECRET, Clock, Door, exactly, names

from paceline.errors import UsageError
from paceline.network.secure import handshake
from paceline.network.secure.admission import Refused, enter, listener


@contextlib.contextmanager
def impostor(*messages: bytes, echo: slice | None = None) -> Iterator[tuple[str, int]]:
    """A server that says these things, one after each that it hears, or sends a part of what it hears back."""

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.settimeout(PATIENCE)
            for number, message in enumerate(messages):
                if number:
                    connection.recv(4096)
                connection.sendall(message)
            if echo is not None:
                connection.sendall(exactly(connection, handshake.ANSWER)[echo])
            with contextlib.suppress(OSError):
                connection.recv(4096)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()
        thread.join()


def proof_for(stranger: socket.socket) -> bytes:
    """A right answer to the gate's greeting."""
    version, nonce = handshake.greeted(exactly(stranger, handshake.GREETING))
    assert version == handshake.VERSION
    return handshake.answer(SECRET, nonce, os.urandom(32))


def test_the_proofs_are_what_the_page_says() -> None:
    gate, client = b"g" * 32, b"c" * 32
    version = (1).to_bytes(4, "little")
    for proof, words in (
        (handshake.client_proof, b"client" + version + gate + client),
        (handshake.gate_proof, b"gate" + version + client + gate),
    ):
        assert proof(SECRET, gate, client) == hmac.new(SECRET, words, "sha256").digest()
    assert handshake.greeting(gate) == b"paceline" + version + gate
    assert handshake.answer(SECRET, gate, client) == b"paceline" + client + handshake.client_proof(SECRET, gate, client)


def test_who_knows_the_secret_comes_in() -> None:
    with Door() as door, door.let_in() as connection:
        (admitted,) = door.admitted
        assert not admitted.getblocking()
        assert connection.getblocking()
        for end in (admitted, connection):
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"reno"
        connection.sendall(b"to the gate")
        admitted.setblocking(True)
        admitted.sendall(b"from it")
        assert exactly(admitted, 11) == b"to the gate"
        assert exactly(connection, 7) == b"from it"
        assert door.lines == []


def test_many_come_in_at_once() -> None:
    with Door() as door, contextlib.ExitStack() as stack:
        knocking = [stack.enter_context(door.knock()) for _ in range(40)]
        for one in knocking:
            door.until(lambda one=one: bool(select.select([one], [], [], 0)[0]))
            one.sendall(proof_for(one))
        door.until(lambda: len(door.admitted) == 40)
        assert door.lines == []


def test_not_a_byte_behind_the_handshake_is_read() -> None:
    with Door() as door, door.knock() as client:
        door.until(lambda: bool(select.select([client], [], [], 0)[0]))
        client.sendall(proof_for(client) + b"more")
        door.until(lambda: bool(door.admitted))
        door.admitted[0].setblocking(True)
        assert exactly(door.admitted[0], 4) == b"more"


def test_a_wrong_secret() -> None:
    with Door() as door:
        with pytest.raises(Refused, match="has another secret; PACELINE_SECRET"):
            door.let_in(b"x" * 32)
        assert door.admitted == []
        assert len(door.lines) == 1
        assert "it has another secret" in door.lines[0]
        assert len(door.gate) == 0


def test_a_recorded_handshake_is_worth_nothing() -> None:
    with Door() as door:
        with door.knock() as client:
            door.until(lambda: bool(select.select([client], [], [], 0)[0]))
            recorded = proof_for(client)
            client.sendall(recorded)
            door.until(lambda: len(door.admitted) == 1)
        with door.knock() as thief:
            thief.sendall(recorded)
            heard = door.turned_away(thief)
            assert heard[handshake.GREETING :] == handshake.REFUSAL
        assert len(door.admitted) == 1


def test_the_gates_own_words_are_no_proof() -> None:
    """What a gate says is sent back to it, and what one connection is told is said on the other."""
    with Door() as door, door.knock() as one, door.knock() as other:
        door.until(lambda: len(select.select([one, other], [], [], 0)[0]) == 2)
        greeting = exactly(one, handshake.GREETING)
        nonce = handshake.greeted(greeting)[1]
        one.sendall(greeting + greeting)  # the size of an answer, and more
        other.sendall(handshake.MAGIC + nonce + handshake.gate_proof(SECRET, os.urandom(32), nonce))
        door.until(lambda: len(door.gate) == 0)
        assert door.admitted == []


def test_a_gate_cannot_send_the_clients_words_back() -> None:
    greeting = handshake.greeting(os.urandom(32))
    for part in (slice(None), slice(-handshake.PROOF, None)):  # all of it, or only the client's proof
        with impostor(greeting, echo=part) as place, pytest.raises(Refused, match="could not prove that it knows"):
            enter(*place, SECRET, timeout=PATIENCE)
    for proof in (bytes(32), b"x" * 32):
        with impostor(greeting, proof) as place, pytest.raises(Refused, match="could not prove that it knows"):
            enter(*place, SECRET, timeout=PATIENCE)


def test_who_is_not_of_this_house() -> None:
    with impostor(b"SSH-2.0-OpenSSH_9.2p1\r\n") as place, pytest.raises(Refused, match="does not speak paceline's"):
        enter(*place, SECRET, timeout=PATIENCE)
    older = handshake.MAGIC + (handshake.VERSION + 1).to_bytes(4, "little") + bytes(32)
    with impostor(older) as place, pytest.raises(Refused, match=r"speaks version 2 .* this side version 1"):
        enter(*place, SECRET, timeout=PATIENCE)


def test_what_only_means_try_again() -> None:
    free = listener("127.0.0.1")
    place = free.getsockname()
    with pytest.raises(TimeoutError):  # it listens, and nobody looks after it
        enter(*place, SECRET, timeout=0.05)
    free.close()
    with pytest.raises(ConnectionRefusedError):
        enter(*place, SECRET, timeout=PATIENCE)
    for said in (b"", handshake.MAGIC, handshake.greeting(bytes(32))[:-1]):
        with socket.create_server(("127.0.0.1", 0)) as server:
            waiting = threading.Thread(target=_say_and_close, args=(server, said))
            waiting.start()
            with pytest.raises(ConnectionResetError, match="closed the connection"):
                enter(*server.getsockname(), SECRET, timeout=PATIENCE)
            waiting.join()


def _say_and_close(server: socket.socket, said: bytes) -> None:
    connection, _ = server.accept()
    with connection:
        connection.sendall(said)


def test_a_gate_that_drips_cannot_hold_a_client_for_ever() -> None:
    done = threading.Event()
    dripped = []

    def drip() -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            for byte in handshake.greeting(bytes(32)):
                if done.wait(0.1):
                    return
                connection.sendall(bytes([byte]))
                dripped.append(byte)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(TimeoutError):
            enter(*server.getsockname(), SECRET, timeout=0.3)
        assert len(dripped) < handshake.GREETING  # each byte was in time, all of them together were not
        done.set()
        thread.join()


def test_a_connection_to_itself_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who tries a port on which nobody listens may be given that very port for its own end."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        own.connect(own.getsockname())
        monkeypatch.setattr(socket, "create_connection", lambda *_: own)
        with pytest.raises(ConnectionRefusedError):
            enter(*own.getsockname(), SECRET, timeout=PATIENCE)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"\0",
        b"pacelinX",
        b"paceline" + bytes(64),
        os.urandom(100_000),
    ],
    ids=["http", "tls", "zero", "almost", "no-proof", "noise"],
)
def test_a_strangers_bytes_cost_one_connection_and_one_line(said: bytes) -> None:
    with Door() as door, door.knock() as stranger:
        with contextlib.suppress(ConnectionError):  # it is closed before all has been said
            stranger.sendall(said)
        door.until(lambda: bool(door.lines))
        assert door.admitted == []
        assert len(door.lines) == 1
        assert door.lines[0].startswith("turned 127.0.0.1:")
        assert door.lines[0].isprintable()
        assert len(door.gate) == 0


def test_a_port_scan() -> None:
    clock = Clock()
    with Door(clock=clock) as door:
        door.knock().close()
        door.until(lambda: bool(door.lines))
        assert "left without proving" in door.lines[0]


def test_silence_ends_at_the_deadline() -> None:
    clock = Clock()
    with Door(clock=clock, deadline=5.0) as door, door.knock() as stranger:
        door.until(lambda: len(door.gate) == 1)
        clock.now += 4.9
        door.pump(0)
        assert door.lines == []
        clock.now += 0.1
        door.pump(0)
        assert door.lines == [
            f"turned 127.0.0.1:{stranger.getsockname()[1]} away: it did not prove the secret within 5 s"
        ]
        assert len(door.gate) == 0


def test_a_slow_drip_ends_at_the_deadline_and_not_before() -> None:
    clock = Clock()
    with Door(clock=clock, deadline=5.0) as door, door.knock() as slow, door.knock() as slower:
        door.until(lambda: len(select.select([slow, slower], [], [], 0)[0]) == 2)
        words = {slow: proof_for(slow), slower: proof_for(slower)}
        for at in range(handshake.ANSWER):
            slow.sendall(words[slow][at : at + 1])
            if at % 2:
                slower.sendall(words[slower][at // 2 : at // 2 + 1])
            clock.now += 4.9 / handshake.ANSWER
            door.pump(0)
        door.until(lambda: len(door.admitted) == 1)  # slow, and in time
        assert door.lines == []
        clock.now += 0.2
        door.pump(0)
        assert len(door.admitted) == 1
        assert len(door.lines) == 1


def test_a_proof_that_lay_there_while_nobody_looked_still_counts() -> None:
    clock = Clock()
    with Door(clock=clock) as door, door.knock() as client:
        door.until(lambda: bool(select.select([client], [], [], 0)[0]))
        client.sendall(proof_for(client))
        select.select([door.gate], [], [], PATIENCE)
        clock.now += 60
        door.pump(0)
        assert len(door.admitted) == 1


def test_two_hundred_strangers_at_once() -> None:
    clock = Clock()
    with Door(clock=clock, most=64) as door, contextlib.ExitStack() as stack:
        strangers = []
        for _ in range(200):
            strangers.append(stack.enter_context(door.knock()))
            door.pump(0)
            assert len(door.gate) <= 64
        # the last ones are still listened to
        door.until(lambda: bool(select.select([strangers[-1]], [], [], 0)[0]))
        strangers[-1].sendall(proof_for(strangers[-1]))
        door.until(lambda: len(door.admitted) == 1)
        assert len(door.lines) == 1
        assert "more than 64 handshakes" in door.lines[0]
        clock.now += 1
        door.pump(0)
        assert door.lines[1].endswith(
            "134 more before that"
        )  # 136 were pushed out: one line each for the first and last
        assert len(door.lines) == 2


def test_strangers_take_no_memory() -> None:
    with Door() as door:

        def crowd() -> None:
            for _ in range(100):
                with door.knock() as stranger:
                    stranger.sendall(b"paceline" + bytes(10_000))
                    door.turned_away(stranger)

        crowd()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            crowd()
            kept, peak = (amount - before for amount in tracemalloc.get_traced_memory())
        finally:
            tracemalloc.stop()
        assert kept < 20_000
        assert peak < 100_000
        assert door.admitted == []


def test_lines_are_counted_rather_than_written() -> None:
    clock = Clock()
    with Door(clock=clock) as door:
        for _ in range(5):
            with door.knock() as stranger:
                stranger.sendall(b"nonsense")
                door.turned_away(stranger)
        assert len(door.lines) == 1
        clock.now += 0.9
        door.pump(0)
        assert len(door.lines) == 1
        clock.now += 0.1
        door.pump(0)
        assert len(door.lines) == 2
        assert door.lines[1].endswith("; 3 more before that")
        clock.now += 10
        door.pump(0)
        assert len(door.lines) == 2


def test_no_descriptors_left_means_a_pause_and_no_spinning() -> None:
    clock = Clock()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Door(clock=clock) as door, door.knock() as client:
        highest = max(map(int, names(Path("/proc/self/fd"))))
        fillers = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    fillers.append(os.dup(0))
            assert select.select([door.gate], [], [], PATIENCE)[0]
            assert door.gate.pump() == []
            assert len(door.lines) == 1
            assert "ulimit -n" in door.lines[0]
            assert not select.select([door.gate], [], [], 0)[0]  # nothing to wake up for
            assert door.gate.pump() == []
        finally:
            for filler in fillers:
                os.close(filler)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        clock.now += 1
        door.until(lambda: bool(select.select([client], [], [], 0)[0]))
        client.sendall(proof_for(client))
        door.until(lambda: len(door.admitted) == 1)


def test_a_closed_gate_leaves_nothing_open() -> None:
    with Door() as door, door.knock() as stranger, door.let_in() as connection:
        assert len(door.gate) == 1
        door.gate.close()
        assert exactly(stranger, handshake.GREETING)
        assert stranger.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            door.knock()
        door.admitted[0].sendall(b"still here")
        assert exactly(connection, 10) == b"still here"


def test_where_nobody_can_listen() -> None:
    with listener("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        assert not taken.getblocking()
        with pytest.raises(UsageError, match=f"port {port} of 127.0.0.1: .*another port"):
            listener("127.0.0.1", port)
    with listener("127.0.0.1", port) as again:  # at once, as a hub does that is started again
        assert again.getsockname()[1] == port
    with pytest.raises(UsageError, match="does not have that address"):
        listener("203.0.113.7")
    with pytest.raises(UsageError, match="cannot listen on 'no such host'"):
        listener("no such host")


def test_a_port_that_has_just_been_in_use_can_be_taken_again() -> None:
    with Door() as door:
        connection = door.let_in()
        door.admitted[0].close()  # this side closes first: the system keeps the pair for a minute
        connection.close()
    with listener(*door.place) as again:
        assert again.getsockname() == door.place


def test_ipv6() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("IPv6 is not installed")
    with listener("::1") as listening, socket.create_connection(listening.getsockname()[:2]):
        assert listening.family == socket.AF_INET6
