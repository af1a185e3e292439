"""Bytes that nobody would send on purpose: no crash, no wait, no memory, and nobody comes in.

Hypothesis draws bytes, which are read as a script: which frames, how each is spoilt, where the stream is cut. The suite
runs 20,000 frames, the same ones each time; `PACELINE_FUZZ=5000000 python -m pytest tests/unit/test_fuzz_net.py` runs
others, as many as it says.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import tracemalloc
from collections import deque

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from net_ends import SECRET

from paceline.network.secure import handshake
from paceline.network.secure.admission import AdmissionListener, Refused
from paceline.network.secure.channel import HEADER, Channel, Closed, ProtocolError, plain

MORE = os.environ.get("PACELINE_FUZZ")
FRAMES = int(MORE or 20_000)
EACH = 100  # frames of one script
STEP = 6  # bytes of a script that make one frame

LIMITS = {0: 0, 1: 64, 2: 5000, 3: 200_000, 0xFFFF: 1}
Message = tuple[int, bytes]


def budget(examples: int) -> settings:
    return settings(
        max_examples=max(1, examples),
        derandomize=MORE is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def scripts(frames: int) -> some.SearchStrategy[bytes]:
    return some.binary(min_size=frames * STEP, max_size=frames * STEP)


class Script:
    """Numbers out of the bytes that hypothesis drew."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def number(self, below: int) -> int:
        """From two bytes."""
        self._at += 2
        return int.from_bytes(self._data[self._at - 2 : self._at], "little") % below

    def rest(self, size: int) -> bytes:
        """Any bytes, without using them up."""
        data = self._data[self._at : self._at + size] or b"\0"
        return (data * (size // len(data) + 1))[:size]

    def __bool__(self) -> bool:
        return self._at + STEP <= len(self._data)


def frame(script: Script) -> tuple[bytes, Message | None]:
    """The bytes of one frame, and the message in it if it is a good one. Takes STEP bytes of the script."""
    how, size, odd = script.number(16), script.number(1 << 16), script.number(1 << 16)
    kind = sorted(LIMITS)[odd % len(LIMITS)]
    payload = script.rest(size % (min(LIMITS[kind], 300) + 1))
    if how < 9:
        return HEADER.pack(kind, 0, len(payload)) + payload, (kind, payload)
    if how == 9:  # as long as it may be
        payload = script.rest(LIMITS[kind])
        return HEADER.pack(kind, 0, len(payload)) + payload, (kind, payload)
    if how == 10:
        return HEADER.pack(kind, 0, LIMITS[kind] + 1 + size) + payload, None
    if how == 11:
        return HEADER.pack(kind, 0, (1 << 64) - 1 - size) + payload, None
    if how == 12:
        return HEADER.pack(kind, 1 + odd % 0xFFFF, len(payload)) + payload, None
    if how == 13:
        return HEADER.pack(4 + odd % (0xFFFF - 4), 0, len(payload)) + payload, None
    if how == 14:
        return b"\xfe" + script.rest(HEADER.size + size % 300), None  # no kind has that first byte
    return HEADER.pack(kind, 0, 0)[: 1 + size % (HEADER.size - 1)], None  # torn: nothing follows


class Wire:
    """One channel, into which a stream of frames is fed in pieces, and what must come out of it. Every other message is
    received into memory that the receiver has given."""

    def __init__(self) -> None:
        self.near, far = socket.socketpair()
        self.channel = Channel(far, limits=LIMITS, room=self._room)
        self._rooms: deque[memoryview | None] = deque()
        self._count = 0
        self.expected: list[Message] = []
        self.found: list[Message] = []

    def feed(self, data: bytes, cut: int) -> None:
        """Write it all; the channel is read whenever the socket is full, and between the pieces."""
        for piece in (data[:cut], data[cut:]):
            view = memoryview(piece)
            while view:
                view = view[self.near.send(view[:50_000]) :]
                self._read()

    def _room(self, kind: int, length: int) -> memoryview | None:
        assert length <= LIMITS[kind]
        self._count += 1
        self._rooms.append(memoryview(bytearray(length)) if self._count % 2 else None)
        return self._rooms[-1]

    def _read(self) -> None:
        for kind, payload in self.channel.receive():
            room = self._rooms.popleft()
            assert room is None or not payload
            self.found.append((kind, bytes(payload if room is None else room)))

    def finish(self) -> type[Exception]:
        """Close this side and read to the end; gives how it ended."""
        self.near.shutdown(socket.SHUT_WR)
        try:
            while True:
                self._read()
        except (Closed, ProtocolError) as error:
            return type(error)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.near.close()
        self.channel.close()


@budget(FRAMES // EACH)
@given(scripts(EACH))
def test_frames(data: bytes) -> None:
    """Good messages come out as they went in, whatever comes behind them; the first bad one ends the channel."""
    script = Script(data)
    while script:
        with Wire() as wire:
            message: Message | None = (0, b"")
            words = b""
            while script and message is not None:
                words, message = frame(script)
                if message is not None:
                    wire.expected.append(message)
                    wire.feed(words, len(words) * (len(wire.expected) % 5) // 5)
            spoilt = message is None and len(words) >= HEADER.size
            if message is None:
                wire.near.sendall(words)
            assert wire.finish() is (ProtocolError if spoilt else Closed)
            assert wire.found == wire.expected


@budget(FRAMES // 200)
@given(some.binary(max_size=200))
def test_noise(data: bytes) -> None:
    """Bytes without any form: messages, an error, or the wait for more; never anything else."""
    with Wire() as wire:
        with contextlib.suppress(ProtocolError):
            wire.feed(data, len(data) // 2)
            wire.finish()
        assert sum(HEADER.size + len(payload) for _, payload in wire.found) <= len(data)


def test_refused_frames_take_no_memory() -> None:
    """Hundreds of channels, each with an announcement of far too much: what is held stays what it was."""

    def storm() -> None:
        for number in range(500):
            with Wire() as wire:
                wire.near.send(HEADER.pack(3, 0, (1 << 34) + number))
                assert wire.finish() is ProtocolError

    storm()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        storm()
        kept, peak = (amount - before for amount in tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()
    assert kept < 50_000
    assert peak < 400_000


class Doorway:
    """Stands for a listening socket: who knocks is one end of a pair, so that no ports are used up."""

    def __init__(self) -> None:
        self.waiting: list[socket.socket] = []
        self._ends = socket.socketpair()

    def knock(self) -> socket.socket:
        near, far = socket.socketpair()
        near.settimeout(20)
        self.waiting.append(far)
        return near

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        if not self.waiting:
            raise BlockingIOError
        return self.waiting.pop(), ("somewhere", 1)

    def setblocking(self, flag: bool) -> None:
        pass

    def fileno(self) -> int:
        return self._ends[0].fileno()

    def close(self) -> None:
        assert not self.waiting
        for end in self._ends:
            end.close()


def answer(script: Script, greeting: bytes, heard: list[bytes]) -> tuple[bytes, bool]:
    """What a stranger says, and whether it begins with a proof. Takes STEP bytes of the script."""
    how, where, what = script.number(12), script.number(1 << 16), script.number(1 << 16)
    nonce, own = handshake.greeted(greeting)[1], os.urandom(32)
    right = handshake.answer(SECRET, nonce, own)
    at = where % len(right)
    words = (
        right,
        right,
        right + script.rest(what % 1000),  # what is behind it is not the gate's to read
        right[:at] + bytes([right[at] ^ (1 << what % 8)]) + right[at + 1 :],
        right[:at],
        right[:at] + script.rest(1 + what % 40) + right[at:],
        heard[where % len(heard)] if heard else b"",  # a proof of another handshake
        greeting + script.rest(what % 200),
        handshake.MAGIC + own + handshake.gate_proof(SECRET, nonce, own),
        handshake.answer(script.rest(16 + what % 32), nonce, nonce),  # with another secret
        handshake.MAGIC + script.rest(handshake.ANSWER - len(handshake.MAGIC)),
        script.rest(what % 5000),
    )[how]
    return words, words.startswith(right)


@budget(FRAMES // (5 * 20))
@given(scripts(20))
def test_handshakes(data: bytes) -> None:
    """Only who proves the secret comes in, and all that it said behind its proof is still there."""
    script = Script(data)
    doorway, lines, now, heard = Doorway(), [], 0.0, []
    gate = AdmissionListener(doorway, SECRET, log=lines.append, clock=lambda: now)  # type: ignore[arg-type]
    while script:
        with doorway.knock() as stranger:
            assert gate.pump() == []
            words, proves = answer(script, stranger.recv(handshake.GREETING), heard)
            admitted: list[socket.socket] = []
            for piece in (words[: len(words) // 3], words[len(words) // 3 :]):
                with contextlib.suppress(BrokenPipeError):  # turned away after the first third
                    stranger.sendall(piece)
                admitted += gate.pump()
            now += 10  # who says too little is gone after that
            admitted += gate.pump()
            assert not gate
            assert len(admitted) == proves
            for connection in admitted:
                heard.append(words[: handshake.ANSWER])
                with connection:
                    rest = words[handshake.ANSWER :]
                    assert (connection.recv(2000) if rest else b"") == rest
    gate.close()
    assert all(line.isprintable() and len(line) < 200 for line in lines)


@budget(FRAMES // 100)
@given(some.binary(max_size=120), some.integers(0, 3))
def test_false_gates(data: bytes, start: int) -> None:
    """Whatever a server says, a client is not let into the wrong house, and does not wait for longer than it wants."""
    near, far = socket.socketpair()
    with near, far:
        greeting = handshake.greeting(os.urandom(32))
        near.sendall((b"", handshake.MAGIC, greeting, greeting[:-1])[start] + data)
        near.shutdown(socket.SHUT_WR)
        with pytest.raises((Refused, ConnectionError)) as refused:
            handshake.prove(far, SECRET, "here:1", time.monotonic() + 20)
        assert str(refused.value).isprintable()


JSON = some.one_of(
    some.binary(max_size=60),
    some.text('[]{}",:0123456789.eE+-\\untrfalsIify \n', max_size=60).map(str.encode),
    some.tuples(some.sampled_from([b"[", b'{"a":', b"[[],"]), some.integers(0, 3000)).map(
        lambda pair: pair[0] * pair[1]
    ),
)


@budget(FRAMES // 50)
@given(JSON)
def test_json(data: bytes) -> None:
    """A value or an error of ours, and nothing else."""
    with contextlib.suppress(ProtocolError):
        plain(data)
