"""What no node would send on purpose: nothing is written where it must not be, nobody crashes, nobody waits.

As in test_fuzz_net.py: hypothesis draws bytes, which are read as a script of frames. The suite runs 20,000 frames, the
same ones each time; `PACELINE_FUZZ=5000000 python -m pytest tests/unit/test_fuzz_tcp_connection.py` runs 5,000,000
others.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import struct
import tempfile
import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from remote_ends import Pair, Server, bytes_of, opened, said, server, small, worker

from paceline.network.calls import tcp_client
from paceline.network.calls.tcp_client import TcpClient
from paceline.network.calls.tcp_connection import AGAIN, EARLY, HEAD, HELLO, ORDER, PIECES, POST, REPLY, WELCOME
from paceline.network.nodes.board_replication import BoardReplica
from paceline.network.nodes.protocol import LIMITS, Bulk, Inbox, write_piece
from paceline.network.secure.channel import Channel, Closed, ProtocolError
from paceline.processes.calls import zero_copy
from paceline.processes.calls.mailbox import COUNT, SAVE, SET, SHOW, put, received
from paceline.processes.calls.zero_copy import ReceiveBuffer
from paceline.processes.memory.board import MAILBOXES, STOP, Board
from paceline.processes.memory.byte_ranges import WritableRanges
from paceline.processes.memory.call_codec import MOST, TENSOR, TEXT, decode, encode
from paceline.processes.memory.packed_words import asks_when
from paceline.processes.memory.run_memory import HEAD_WORDS, RunMemory
from paceline.processes.memory.segment import Segment

MORE = os.environ.get("PACELINE_FUZZ")
FRAMES = int(MORE or 10_000) // 8  # of each of the tests
EACH = 250  # frames of one script
STEP = 16  # bytes of a script that make one frame

ODD = (0, 1, -1, 2, 7, 64, 1 << 31, (1 << 32) + 1, 1 << 40, 1 << 62, (1 << 63) - 1, -(1 << 63), -2, 255, MOST, 512)
KINDS = (HELLO, WELCOME, POST, REPLY, AGAIN, ORDER, EARLY)


def budget(examples: int) -> settings:
    return settings(
        max_examples=max(1, examples),
        derandomize=MORE is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def scripts(frames: int = EACH) -> some.SearchStrategy[bytes]:
    return some.binary(min_size=frames * STEP, max_size=frames * STEP)


class Script:
    """Numbers out of the bytes that hypothesis drew, and any more out of a stream that begins with them."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def frames(self) -> Iterator[np.random.Generator]:
        for at in range(0, len(self._data) - STEP + 1, STEP):
            yield np.random.Generator(np.random.PCG64(list(self._data[at : at + STEP])))


def number(draw: np.random.Generator, near: tuple[int, ...]) -> int:
    """Often one that could be right, and sometimes one beside it."""
    how = draw.integers(10)
    if how < 7:
        return int(near[draw.integers(len(near))])
    if how < 9:
        return ODD[draw.integers(len(ODD))]
    return min(max(int(near[draw.integers(len(near))]) + int(draw.integers(-9, 10)), -(1 << 63)), (1 << 63) - 1)


class Places:
    """Numbers that mean something in a stage's memory."""

    def __init__(self, memory: RunMemory) -> None:
        spans = {name: place.offset for name, place in memory.layout.places.items()}
        self.offsets = tuple(spans.values())
        self.own = tuple(
            offset for name, offset in spans.items() if name.startswith(("lane.0.", "grad.0", "worker.0", "server"))
        )
        self.size = memory.segment.size


def values(draw: np.random.Generator, places: Places, count: int) -> list[int]:
    """Words, good or nearly so."""
    if draw.integers(4) == 0:
        return [number(draw, (0, 1, 2, 3, 4, 5, 6)) for _ in range(draw.integers(20))]
    words = [count]
    for _ in range(count):
        kind = int(draw.integers(7))
        if kind == TENSOR:
            dims = int(draw.integers(3))
            words += [TENSOR, number(draw, (0, 1, 4)), number(draw, places.own), dims]
            words += [number(draw, (1, 2, 6)) for _ in range(dims)]
        elif kind == TEXT:
            text = draw.bytes(int(draw.integers(20))) if draw.integers(2) else b"lr"
            words += [TEXT, len(text), *np.frombuffer(text + bytes(-len(text) % 8), dtype=np.int64).tolist()]
        else:
            words += encode((({1: 5, 2: 0.5, 3: True}.get(kind), ("a", (1,)))[kind == 6],), lambda _: 0)[1:]
    if draw.integers(4) == 0 and words:  # one of them is another
        words[draw.integers(len(words))] = number(draw, (0, 1, 2, 3, 4, 5, 6))
    if draw.integers(8) == 0:
        words = words[: draw.integers(len(words) + 1)]
    return words


def frame(draw: np.random.Generator, places: Places, kinds: tuple[int, ...]) -> tuple[bytes, bool]:
    """The bytes of one message, nearly right, and whether they are torn or so noisy that nothing can follow."""
    how = draw.integers(20)
    if how == 0:
        return draw.bytes(int(draw.integers(200))), True
    kind = kinds[draw.integers(len(kinds))] if how > 1 else int(draw.integers(1 << 16))
    words = values(draw, places, int(draw.integers(4)))
    if kind == WELCOME and draw.integers(2):
        words = [number(draw, (0, 1, 5)) for _ in range(2 * MAILBOXES)]
    if kind == ORDER and draw.integers(2):
        words = [number(draw, (0, 1))]
    pieces, data = [], b""
    for _ in range(draw.integers(3)):
        offset, size = number(draw, places.own), number(draw, (0, 4, 24, 100))
        pieces.append((offset, size))
        data += draw.bytes(size if 0 <= size < 5000 else 10)
    words = words[: MOST + 40]
    whole = bytes_of(
        kind,
        int(draw.integers(MAILBOXES)) if draw.integers(5) else int(draw.integers(1 << 32)),
        number(draw, (1, 2, 3, 4, 5)),
        number(draw, (0, 1, 2, asks_when(0), asks_when(1), SAVE, SET, SHOW, COUNT, 4)),
        number(draw, (0, 1, 2)),
        words=words,
        pieces=pieces,
        data=data,
        zero=int(how == 2),
        counts=(int(draw.integers(1 << 32)), int(draw.integers(1 << 32))) if how == 3 else None,
    )
    if how == 4:
        return whole[: draw.integers(len(whole))], True
    if how == 5:
        spoilt = bytearray(whole)
        for _ in range(1 + draw.integers(3)):
            spoilt[draw.integers(len(spoilt))] ^= 1 << draw.integers(8)
        return bytes(spoilt), True
    return whole, how == 3


def others(memory: RunMemory, mine: list[tuple[int, int]]) -> Callable[[], bytes]:
    """What must stay as it is: all memory but some spans."""
    keep = np.ones(memory.segment.size, dtype=bool)
    for offset, size in mine:
        keep[offset : offset + size] = False
    content = np.frombuffer(memory.segment.memory, dtype=np.uint8)
    return lambda: content[keep].tobytes()


def heads(memory: RunMemory, rank: int) -> list[tuple[int, int]]:
    return memory.spans([f"lane.{rank}.{number}.head" for number in range(MAILBOXES)])


# a wire by itself


@budget(FRAMES // EACH)
@given(scripts())
def test_wires(data: bytes) -> None:
    """Messages, the wait for more, or one of two errors; only the areas are written."""
    with small(1, 0) as (_, memory):
        places = Places(memory)
    for draw in Script(data).frames():
        with Pair(((100, 500), (1000, 24))) as pair, contextlib.suppress(ProtocolError, Closed):
            for _ in range(3):
                sent, _ = frame(draw, places, KINDS)
                with contextlib.suppress(BrokenPipeError):
                    pair.raw.sendall(sent)
                pair.pull()
            pair.raw.shutdown(socket.SHUT_WR)
            pair.pull()
        memory = pair.segments[1].bytes
        assert not memory[:100].any()
        assert not memory[600:1000].any()
        assert not memory[1024:].any()


# a server's door


class Visit:
    """Worker 0 at a server's door, for as long as it is let in."""

    def __init__(self, made: Server) -> None:
        self.made, self.memory, self.board = made, made.memory, made.board
        self.connection = made.let_in()
        assert made.hear(bytes_of(HELLO, 0), self.connection)
        self.methods = [made.memory.scheme.methods[name] for name in sorted(made.memory.scheme.methods)]

    def say(self, data: bytes, last: bool) -> bool:
        """Whether it is still in. Whatever has been posted meanwhile can be taken."""
        before = self.board.posted.tolist()
        inside = self.made.hear(data, self.connection)
        for index, posted in enumerate(self.board.posted.tolist()):
            if posted != before[index]:
                assert index < MAILBOXES
                taken = received(self.memory, self.made.mailboxes[index], self.methods, self.memory.bounds(0))
                if not isinstance(taken, tuple):
                    assert len(taken.args) == 2 or taken.method.name != "both"
        if last:
            self.made.hear(b"", self.connection)
        return inside and not last

    def leave(self) -> None:
        self.connection.close()
        self.memory.wakeup.look()


@budget(FRAMES // EACH)
@given(scripts())
def test_a_worker_at_the_door(data: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch, server() as made, contextlib.redirect_stdout(None):
        patch.setattr(zero_copy, "LARGE", 4)
        made.board.posted[1] = made.board.answered[0][1] = 3  # it may ask for that answer again
        places = Places(made.memory)
        spans = made.memory.spans_from_worker(0)
        untouched = others(made.memory, [*spans, *heads(made.memory, 0), *made.memory.spans(["owed"])])
        bytes_before, board = untouched(), made.board.words.tobytes()
        owed, x = made.door.owed, made.memory.tensor("server.x")
        visit = Visit(made)
        for draw in Script(data).frames():
            if owed.of(made.mailboxes[1]) is None:  # the answer lies in the state
                assert owed.note(made.mailboxes[1], x, made.mailboxes[1].reply_at)
            sent, torn = frame(draw, places, (POST, POST, POST, AGAIN, HELLO, REPLY))
            if not visit.say(sent, torn):
                visit.leave()
                visit = Visit(made)
        visit.leave()
        assert untouched() == bytes_before
        assert [mailbox.index for mailbox, *_ in owed.settle()] in ([], [1])
        made.board.posted[:MAILBOXES] = made.board.answered[0][:MAILBOXES]
        made.board.posted[1] = 3
        assert made.board.words.tobytes() == board
        assert not made.door._unknown
        assert not made.door._wires


@budget(FRAMES // EACH)
@given(scripts())
def test_anybody_at_the_door(data: bytes) -> None:
    """Who has proved the secret and has not said who it is, or says that it is a server that follows."""
    with server(servers=2) as made, contextlib.redirect_stdout(None):
        made.board.put("ordered", 5)
        places = Places(made.memory)
        mine = [span for rank in range(2) for span in (*made.memory.spans_from_worker(rank), *heads(made.memory, rank))]
        untouched = others(made.memory, mine)
        bytes_before = untouched()
        for draw in Script(data).frames():
            connection = made.let_in()
            hello = bytes_of(HELLO, int(draw.integers(6)), number(draw, (0, 1)), number(draw, (0, 3, 5)))
            sent, _ = frame(draw, places, KINDS)
            made.hear(hello * int(draw.integers(3)) + sent, connection)
            connection.close()
            made.memory.wakeup.look()
        assert untouched() == bytes_before
        assert made.board.get("ordered") == 5


# a worker's reach


@budget(FRAMES // EACH)
@given(scripts())
def test_a_server_that_has_lost_its_mind(data: bytes) -> None:
    """Only the areas of servers and this worker's lanes are written; what counts as answered can be read."""
    with worker() as (theatre, memory, reach, far), contextlib.redirect_stdout(None):
        board, places = theatre.board, Places(memory)
        for mailbox in reach._mailboxes:  # calls without arguments
            put(mailbox.request, array("q", [0]))
        version = (8 * memory.version_words()[0], 8)  # comes with answers
        untouched = others(memory, [*memory.spans_from_server(0), *heads(memory, 0), version])
        bytes_before = untouched()
        for draw in Script(data).frames():
            board.posted[:MAILBOXES] = array("q", [1, 2, 3, 4])
            board.answered[0][:MAILBOXES] = array("q", [0] * MAILBOXES)
            board.run[STOP] = 0
            block = mmap.mmap(-1, 100)
            landing = ReceiveBuffer(
                reach._mailboxes[0].reply_at, 24, block, torch.frombuffer(block, dtype=torch.float32, count=6)
            )
            reach.expect(reach._mailboxes[0], landing)
            sent, torn = frame(draw, places, (REPLY, REPLY, REPLY, WELCOME))
            if draw.integers(3) == 0:  # nearly what is expected
                near = (landing.at, landing.at + 4, landing.at + 20)
                pieces = [(number(draw, near), number(draw, (4, 20, 24))) for _ in range(draw.integers(1, 3))]
                sent = bytes_of(
                    REPLY, 0, 1, pieces=pieces, data=b"!" * min(200, max(0, sum(size for _, size in pieces)))
                )
                torn = True
            inside = said(sent, far, memory.wakeup.look)
            assert not any(block[24:])
            if board.answered[0][0] == board.posted[0]:
                assert reach.landed(reach._mailboxes[0]) in (landing, None)
            for index, mailbox in enumerate(reach._mailboxes):
                if board.answered[0][index] == board.posted[index] and mailbox.reply[0]:
                    (_,) = decode(mailbox.reply[1 : 1 + mailbox.reply[0]].tolist(), memory.segment.tensor)
            assert 0 <= board.run[STOP] <= 2
            if torn or not inside:
                far.close()
                while reach._wires[0] is not None:  # one message at each look, and then the end
                    memory.wakeup.look()
                far = connected_anew(reach)
        assert untouched() == bytes_before
        assert board.posted[:MAILBOXES].tolist() == [1, 2, 3, 4]
        far.close()


def connected_anew(reach: TcpClient) -> socket.socket:
    """The other end of a reach's next connection."""
    near, far = socket.socketpair()
    near.setblocking(False)
    near.sendall(bytes_of(WELCOME, words=[0] * (2 * MAILBOXES)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tcp_client, "enter", lambda *_, **__: far)
        reach._tried.clear()
        reach._reconnect()
    return near


# hub and agents


@budget(FRAMES // EACH)
@given(scripts())
def test_boards(data: bytes) -> None:
    """A node's own words are not another's to write."""
    with small(0, 1) as (theatre, _):
        memory, board = opened(theatre, 0, 0), theatre.board
        mirror = BoardReplica(board, ahead=5)
        mirror.open(memory)
        version = memory.version_words()[0]
        untouched = others(memory, [(8 * version, 8)])
        bytes_before, own = untouched(), board.words[board.common :].tobytes()
        near = tuple(range(0, board.common + 2, 7))
        for draw in Script(data).frames():
            rows = [(number(draw, near), number(draw, (0, 1, 2))) for _ in range(draw.integers(6))]
            sent = np.array(rows, dtype=np.int64).tobytes() + draw.bytes(int(draw.integers(4)) // 3 * 5)
            before, stop = board.words.tobytes(), board.run[STOP]
            try:
                mirror.hear(sent)
            except ProtocolError:
                assert board.words.tobytes() == before
            assert board.run[STOP] >= stop
            mirror.news()
        assert untouched() == bytes_before
        assert board.words[board.common :].tobytes() == own


@budget(FRAMES // EACH)
@given(scripts())
def test_pieces(data: bytes) -> None:
    with Pair() as pair:
        memory: Segment = pair.segments[0]
        areas = WritableRanges([(100, 500), (1000, 24)])
        for draw in Script(data).frames():
            size = number(draw, (0, 4, 24))
            offset = number(draw, (100, 590, 1000, 0, memory.size - 4))
            sent = struct.pack("<qq", offset, size) + b"\1" * (size if 0 <= size < 1000 else 3)
            if draw.integers(5) == 0:
                sent = sent[: draw.integers(len(sent) + 1)]
            with contextlib.suppress(ProtocolError):
                write_piece(bytearray(sent), memory, areas)
        assert not memory.bytes[:100].any()
        assert not memory.bytes[600:1000].any()
        assert not memory.bytes[1024:].any()


NAMES = ("logs/a", "logs/b/c", "order/0/x", "logs", "..", "/", "logs/../..", "other/a", "", "logs/\0", "é", "a" * 600)


@budget(FRAMES // EACH)
@given(scripts())
def test_files(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run").mkdir()
        inbox = Inbox(folder / "run", ("logs", "order"), lambda text: None)
        for draw in Script(data).frames():
            about = {
                "name": "".join(NAMES[draw.integers(len(NAMES))] for _ in range(1 + draw.integers(2))),
                "at": number(draw, (0, 0, 5)),
                "last": bool(draw.integers(2)),
            }
            if draw.integers(8) == 0:
                about[("name", "at", "last", "x")[draw.integers(4)]] = [None, 1.5, [], "a"][draw.integers(4)]
            text = json.dumps(about).encode()
            if draw.integers(8) == 0:
                text = text[: draw.integers(len(text))]
            length = len(text) if draw.integers(8) else number(draw, (len(text),)) & 0xFFFFFFFF
            with contextlib.suppress(ProtocolError):
                inbox.take(bytearray(struct.pack("<I", length) + text + draw.bytes(int(draw.integers(30)))))
        assert [path.name for path in folder.iterdir()] == ["run"]
        assert {path.name for path in (folder / "run").iterdir()} <= {"logs", "order"}
        assert all(path.stat().st_size < 100 * EACH for path in folder.rglob("*") if path.is_file())


@budget(FRAMES)
@given(some.binary(max_size=12))
def test_counts(data: bytes) -> None:
    near, far = socket.socketpair()
    bulk = Bulk(Channel(near, limits=LIMITS))
    with far, contextlib.suppress(ProtocolError):
        bulk.acknowledge(data)
    bulk.channel.close()
    assert 0 <= bulk.taken <= 1


# memory


def test_heads_that_claim_much_take_little() -> None:
    """The most that a head may announce is taken, which is little, and nothing of what is more."""

    def storm(pairs: list[Pair]) -> None:
        for number_, pair in enumerate(pairs):
            greedy = number_ % 2
            counts = (0xFFFFFFFF, 0xFFFFFFFF) if greedy else (MOST + 32, PIECES)
            pair.raw.sendall(HEAD.pack(POST, 0, 0, 0, 0, 0, *counts))
            with pytest.raises(ProtocolError) if greedy else contextlib.nullcontext():
                pair.pull()

    with contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(Pair()) for _ in range(40)]
        tracemalloc.start()
        try:
            storm(pairs)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 20 * (8 * HEAD_WORDS + 16 * PIECES) + 200_000


def test_the_board_is_as_large_as_it_is() -> None:
    """A pair for every word, and one more."""
    board = Board.create(1, 1)
    mirror = BoardReplica(board)
    rows = np.stack([np.arange(board.common), np.full(board.common, 2)], axis=1)
    mirror.hear(rows.astype(np.int64).tobytes())
    with pytest.raises(ProtocolError, match="beyond"):
        mirror.hear((rows + np.array([1, 0])).astype(np.int64).tobytes())
