"""The connection of two workers for messages: what arrives, whole and in turn, and what is refused."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch

from paceline.network.means import mean_rooms
from paceline.network.means.message_link import _HEAD, HEAD, NOTE, PART, Head, Letter, MessageLink, Note
from paceline.network.secure.channel import Channel, ProtocolError

V = torch.arange(1000, dtype=torch.float64)
SIZE = V.nbytes
MOST = 2 * SIZE
Ends = tuple[MessageLink, MessageLink]


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mean_rooms, "SLICE", 3000)


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, other = (MessageLink(end, SIZE, MOST) for end in socket.socketpair())
    yield one, other
    one.bury()
    other.bury()


def head(slot: int = 0, sequence: int = 1, step: int = 7, size: int = SIZE, packed: int = 0) -> Head:
    return Head(slot, sequence, 3, step, 0.5, size, packed)


def everything(link: MessageLink, count: int) -> list[Letter | Note]:
    found: list[Letter | Note] = []
    while len(found) < count:
        assert link.channel.wait(5.0)
        found += link.exchange()
    return found


def test_messages_come_whole_between_notes(ends: Ends) -> None:
    one, other = ends
    payload = torch.arange(10, dtype=torch.uint8)
    one.note(Note(1, 2, 3))
    one.message(head(2, 4), V)
    one.message(head(3, 1, size=10, packed=1), payload)
    one.note(Note(0, 1, 0))
    first, message, packed, last = everything(other, 4)
    assert first == Note(1, 2, 3)
    assert isinstance(message, Letter)
    assert message.head == head(2, 4)
    assert torch.equal(message.data.view(torch.float64), V)
    assert isinstance(packed, Letter)
    assert torch.equal(packed.data, payload)
    assert last == Note(0, 1, 0)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        ([(PART, b"12345678")], "PART came before a HEAD"),
        ([(HEAD, b"short")], "HEAD with 5 bytes"),
        ([(HEAD, _HEAD.pack(*head(size=SIZE + 8)))], "a vector has 8,000 bytes"),
        ([(HEAD, _HEAD.pack(*head(size=MOST + 8, packed=1)))], "a message with"),
        ([(HEAD, _HEAD.pack(*head(size=0, packed=1)))], "a message with"),
        ([(HEAD, _HEAD.pack(*head(slot=4)))], "there are 4 slots"),
        ([(HEAD, _HEAD.pack(*head(slot=-1)))], "there are 4 slots"),
        ([(HEAD, _HEAD.pack(*head(sequence=0)))], "a message with"),
        ([(HEAD, _HEAD.pack(*head()))] * 2, "HEAD came inside a message"),
        ([(HEAD, _HEAD.pack(*head(size=10, packed=1))), (PART, b"12345678910")], "PART with 11 bytes, of a message of"),
        ([(PART, bytes(3001))], "claims 3,001 bytes"),
        ([(NOTE, b"1234")], "NOTE with 4 bytes"),
        ([(NOTE, b"\4" + bytes(23))], "a note of slot 4"),
        ([(9, b"")], "kind 9"),
    ],
)
def test_what_is_no_message_is_refused(sent: list[tuple[int, bytes]], why: str, ends: Ends) -> None:
    one, other = ends
    for kind, payload in sent:
        Channel.send(one.channel, kind, payload)
    with pytest.raises(ProtocolError, match=why):
        everything(other, 1)
