"""What hub and agents send each other: pieces of memory, files, and who has taken what."""

from __future__ import annotations

import json
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
from remote_ends import segment

from paceline.network.nodes import protocol
from paceline.network.nodes.protocol import CHUNK, LIMITS, Bulk, Inbox, NodeMessage, write_piece
from paceline.network.secure.channel import Channel, ProtocolError
from paceline.processes.memory.byte_ranges import WritableRanges

SIZE = 1 << 14


def piece(offset: int, data: bytes, size: int | None = None) -> bytearray:
    return bytearray(struct.pack("<qq", offset, len(data) if size is None else size) + data)


def joined(chunks: protocol.Chunks) -> list[tuple[int, bytearray]]:
    return [(kind, bytearray(b"".join(bytes(part) for part in parts))) for kind, parts in chunks]


# memory


def test_pieces_come_to_where_they_were() -> None:
    one, other = segment(SIZE), segment(SIZE)
    one.bytes.random_(0, 256)
    view = memoryview(one.memory)
    for kind, payload in joined(protocol.pieces([(0, view[:100]), (4000, view[4000:SIZE]), (200, view[200:200])])):
        assert kind == NodeMessage.PIECES
        assert len(payload) <= LIMITS[NodeMessage.PIECES]
        write_piece(payload, other, None)
    assert other.memory[:100] == one.memory[:100]
    assert other.memory[4000:] == one.memory[4000:]
    assert not any(other.memory[100:4000])


def test_large_pieces_are_cut() -> None:
    found = joined(protocol.pieces([(64, memoryview(bytes(2 * CHUNK + 1)))]))
    assert [struct.unpack_from("<qq", payload) for _, payload in found] == [
        (64, CHUNK),
        (64 + CHUNK, CHUNK),
        (64 + 2 * CHUNK, 1),
    ]


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (bytearray(), "without an address"),
        (bytearray(15), "without an address"),
        (piece(0, b"abc", size=2), "beyond"),
        (piece(0, b"abc", size=1 << 62), "beyond"),
        (piece(0, b"abc", size=-3), "beyond"),
        (piece(-1, b"abc"), "beyond"),
        (piece(-(1 << 63), b"abc"), "beyond"),
        (piece(SIZE - 2, b"abc"), "beyond"),
        (piece((1 << 63) - 1, b"abc"), "beyond"),
        (piece(99, b"abc"), "not the sender's"),
        (piece(500, b"abc"), "not the sender's"),
    ],
)
def test_pieces_beyond_what_the_sender_may_write_are_refused(payload: bytearray, said: str) -> None:
    memory = segment(SIZE)
    with pytest.raises(ProtocolError, match=said):
        write_piece(payload, memory, WritableRanges([(0, 100)]))
    assert not memory.bytes.any()


# files


def part(name: Any, data: bytes = b"", at: Any = 0, last: Any = True) -> bytearray:
    about = json.dumps({"name": name, "at": at, "last": last}).encode()
    return bytearray(struct.pack("<I", len(about)) + about + data)


class Box:
    """An inbox in a run directory, beside a folder that is none of its business."""

    def __init__(self, folder: Path) -> None:
        self.root, self.outside, self.lines = folder / "run", folder / "outside", list[str]()
        self.root.mkdir()
        self.outside.mkdir()
        self.inbox = Inbox(self.root, ("logs", "order"), self.lines.append)

    def files(self) -> dict[str, bytes]:
        folders = (self.root, self.outside)
        return {
            str(path.relative_to(self.root.parent)): path.read_bytes()
            for folder in folders
            for path in folder.rglob("*")
            if path.is_file() and not path.is_symlink()
        }


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


def test_files_arrive_whole(box: Box, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "order" / "0").mkdir(parents=True)
    contents = {"order/0/a.log": b"", "order/0/b.log": b"x" * 100, "order/c": bytes(range(256)) * (CHUNK // 128)}
    for name, data in contents.items():
        (source / name).write_bytes(data)
    for kind, payload in joined(protocol.files(source, [source / name for name in contents])):
        assert kind == NodeMessage.FILE
        assert len(payload) <= LIMITS[NodeMessage.FILE]
        box.inbox.take(payload)
    assert box.files() == {f"run/{name}": data for name, data in contents.items()}
    assert box.lines == []


def test_a_file_that_vanishes_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    found = joined(protocol.files(tmp_path, [tmp_path / "gone", tmp_path / "a"]))
    assert len(found) == 1
    assert b'"a"' in found[0][1]


def test_a_file_is_seen_only_when_it_is_whole(box: Box) -> None:
    box.inbox.take(part("order/a", b"one", last=False))
    assert box.files() == {"run/order/a.part": b"one"}
    box.inbox.take(part("order/a", b"two", at=3))
    assert box.files() == {"run/order/a": b"onetwo"}
    box.inbox.take(part("order/a", b"new"))
    assert box.files() == {"run/order/a": b"new"}


def test_logs_follow_each_other(box: Box) -> None:
    box.inbox.take(part("logs/worker-1.log", b"first\n"))
    box.inbox.take(part("logs/worker-1.log", b"second\n"))
    assert box.files() == {"run/logs/worker-1.log": b"first\nsecond\n"}


def test_a_part_whose_beginning_is_missing_is_left_out(box: Box) -> None:
    box.inbox.take(part("order/a", b"x", at=5))
    box.inbox.take(part("order/b", b"xy", last=False))
    box.inbox.take(part("order/b", b"x", at=1 << 35))
    assert box.files() == {"run/order/b.part": b"xy"}
    assert len(box.lines) == 2


@pytest.mark.parametrize(
    "name",
    [
        "",
        "logs",
        "plan.json",
        "checkpoints/1",
        "../outside/a",
        "logs/../../outside/a",
        "logs/..",
        "/etc/passwd",
        "//logs/a",
        "./..",
        "logs/a\0b",
        "logs/a\nb",
        "logs/\ud800",
        "logs/" + "a" * 600,
        5,
        None,
        ["logs", "a"],
    ],
)
def test_names_that_are_not_allowed(box: Box, name: Any) -> None:
    with pytest.raises(ProtocolError, match="not allowed"):
        box.inbox.take(part(name, b"evil"))
    assert box.files() == {}


@pytest.mark.parametrize(("at", "last"), [(-1, True), (1 << 40, True), (0.5, True), ("0", True), (0, 1), (0, None)])
def test_places_that_are_not_allowed(box: Box, at: Any, last: Any) -> None:
    with pytest.raises(ProtocolError, match="not allowed"):
        box.inbox.take(part("logs/a", b"evil", at=at, last=last))
    assert box.files() == {}


@pytest.mark.parametrize(
    "payload",
    [b"", b"\1\0", struct.pack("<I", 0), struct.pack("<I", 0xFFFFFFFF) + b"{}", struct.pack("<I", 3) + b"[1]"],
)
def test_what_is_no_file_at_all(box: Box, payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        box.inbox.take(bytearray(payload))


@pytest.mark.parametrize("name", ["order/a", "order/0/a", "logs/a"])
def test_links_do_not_lead_out(box: Box, name: str) -> None:
    """A folder, the file itself or the one written aside may be a link that somebody has put there."""
    (box.outside / "a").write_bytes(b"theirs")
    (box.root / "order").symlink_to(box.outside)
    (box.root / "logs").mkdir()
    (box.root / "logs" / "a").symlink_to(box.outside / "a")
    box.inbox.take(part(name, b"evil"))
    assert {path: data for path, data in box.files().items() if "outside" in path} == {"outside/a": b"theirs"}
    assert len(box.lines) == 1
    assert name in box.lines[0]


def test_nor_does_a_link_in_place_of_what_is_written_aside(box: Box) -> None:
    (box.outside / "a").write_bytes(b"theirs")
    (box.root / "order").mkdir()
    (box.root / "order" / "a.part").symlink_to(box.outside / "a")
    box.inbox.take(part("order/a", b"evil"))
    assert box.files() == {"outside/a": b"theirs"}
    assert "order/a could not be written" in box.lines[0]


def test_a_link_in_place_of_the_file_is_replaced(box: Box) -> None:
    (box.outside / "a").write_bytes(b"theirs")
    (box.root / "order").mkdir()
    (box.root / "order" / "a").symlink_to(box.outside / "a")
    box.inbox.take(part("order/a", b"ours"))
    assert box.files() == {"outside/a": b"theirs", "run/order/a": b"ours"}


def test_a_run_directory_may_itself_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "real")
    Inbox(tmp_path / "run", ("logs",), lambda text: pytest.fail(text)).take(part("logs/a", b"ours"))
    assert (tmp_path / "real" / "logs" / "a").read_bytes() == b"ours"


# who has taken what


def test_batches_are_counted() -> None:
    near, far = socket.socketpair()
    one, other = (Bulk(Channel(end, limits=LIMITS)) for end in (near, far))
    try:
        assert not one.busy
        one.give(protocol.after(3, 4), protocol.layout(b"{}", 5))
        one.give()
        assert (one.busy, one.pending) == (True, True)
        one.feed()
        assert not one.pending
        kinds = []
        for kind, payload in other.channel.receive():
            kinds.append(kind)
            if kind == NodeMessage.TAKEN:
                other.acknowledge(payload)
        assert kinds == [NodeMessage.AFTER, NodeMessage.LAYOUT, NodeMessage.TAKEN, NodeMessage.TAKEN]
        assert one.busy
        for kind, payload in one.channel.receive():
            assert kind == NodeMessage.TAKEN
            one.acknowledge(payload)
        assert not one.busy
        assert not other.busy
    finally:
        one.channel.close()
        other.channel.close()


def test_what_waits_is_handed_on_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to be sent is made only when the connection can take it."""
    monkeypatch.setattr(protocol, "AHEAD", 1 << 16)
    near, far = socket.socketpair()
    bulk, other = Bulk(Channel(near, limits=LIMITS)), Channel(far, limits=LIMITS)
    made = []

    def parts() -> protocol.Chunks:
        for number in range(100):
            made.append(number)
            yield NodeMessage.LAYOUT, (bytes(1 << 16),)

    try:
        bulk.give(parts())
        bulk.feed()
        assert 0 < len(made) < 100
        found: list[int] = []
        while bulk.pending:
            found += [kind for kind, _ in other.receive()]
            bulk.feed()
        found += [kind for kind, _ in other.receive()]
        while len(found) < 101:  # a flood comes in shares
            found += [kind for kind, _ in other.receive()]
        assert found == [NodeMessage.LAYOUT] * 100 + [NodeMessage.TAKEN]
    finally:
        bulk.channel.close()
        other.close()


@pytest.mark.parametrize("size", [0, 3, 5, 100])
def test_a_count_of_another_length_is_refused(size: int) -> None:
    near, far = socket.socketpair()
    bulk = Bulk(Channel(near, limits=LIMITS))
    with far, pytest.raises(ProtocolError):
        bulk.acknowledge(bytes(size))
    bulk.channel.close()
    assert bulk.taken == 0
