"""The connection of two workers for meetings among some: what arrives, whole and in turn, and what is refused."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch

from paceline.network.means import mean_rooms
from paceline.network.means.peer_link import CELLS, HAVE, OFFER, PART, Have, Occasion, Offer, PeerLink
from paceline.network.secure.channel import Channel, Closed, ProtocolError

AT, NEXT = Occasion(0, 7, 99, 0), Occasion(0, 9, 98, 0)
V = torch.arange(1000, dtype=torch.float64)
MOST = V.numel() * 8


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mean_rooms, "SLICE", 3000)


@pytest.fixture
def ends() -> Iterator[tuple[PeerLink, PeerLink]]:
    one, other = (PeerLink(end, MOST) for end in socket.socketpair())
    yield one, other
    one.bury()
    other.bury()


def head(at: Occasion, number: int, *, given: bool, v: torch.Tensor = V) -> bytes:
    return Offer.packed(at, number, 0.5, v, given=given)


def everything(link: PeerLink, count: int) -> list[Offer | Have]:
    found: list[Offer | Have] = []
    while len(found) < count:
        assert link.channel.wait(5.0)
        found += link.exchange()
    return found


def test_offers_come_whole_and_one_after_the_other(ends: tuple[PeerLink, PeerLink]) -> None:
    one, other = ends
    lives = Have(AT, frozenset({(0, 1), (2, 3)}))
    one.offer(head(AT, 4, given=True), V)
    one.have(lives)
    one.offer(head(NEXT, 5, given=False), None)
    one.offer(head(NEXT, 6, given=True), 2 * V)
    first, have, second, third = everything(other, 4)
    assert isinstance(first, Offer)
    assert isinstance(second, Offer)
    assert isinstance(third, Offer)
    assert (first.occasion, first.number, first.told) == (AT, 4, 0.5)
    assert torch.equal(torch.as_tensor(first.vector), V)
    assert have == lives
    assert (second.occasion, second.vector) == (NEXT, None)
    assert torch.equal(torch.as_tensor(third.vector), 2 * V)


def test_an_offer_whose_end_is_on_its_way_is_not_read(ends: tuple[PeerLink, PeerLink]) -> None:
    """The front of the second offer comes with the first."""
    one, other = ends
    sent = bytearray()
    ours, theirs = socket.socketpair()
    recorder = Channel(ours, limits={})
    for number in (1, 2):
        recorder.send(OFFER, head(AT, number, given=False))
    sent += theirs.recv(1 << 16)
    raw = one.channel._connection
    raw.send(sent[:-10])
    (first,) = everything(other, 1)
    assert isinstance(first, Offer)
    assert first.number == 1
    raw.send(sent[-10:])
    (second,) = everything(other, 1)
    assert isinstance(second, Offer)
    assert second.number == 2
    recorder.close()
    theirs.close()


def test_cells_go_where_they_are_waited_for(ends: tuple[PeerLink, PeerLink]) -> None:
    one, other = ends
    cells, room = torch.arange(7000).to(torch.uint8), torch.zeros(7000, dtype=torch.uint8)
    one.give_cells(cells)  # nobody waits for these
    one.offer(head(AT, 1, given=False), None)
    everything(other, 1)
    other.expect_cells(room)
    one.give_cells(cells)
    one.offer(head(AT, 2, given=False), None)
    everything(other, 1)
    assert not other.cells_missing
    assert torch.equal(room, cells)


@pytest.mark.parametrize(
    ("kind", "payload", "why"),
    [
        (PART, b"12345678", "PART came before an OFFER"),
        (OFFER, b"short", "OFFER with 5 bytes"),
        (OFFER, head(AT, 1, given=True, v=torch.zeros(MOST // 8 + 1, dtype=torch.float64)), "bytes are allowed"),
        (HAVE, b"1234", "HAVE with 4 bytes"),
        (CELLS, bytes(3001), "claims 3,001 bytes"),
        (9, b"", "kind 9"),
    ],
)
def test_what_is_no_message_of_a_meeting_is_refused(
    kind: int, payload: bytes, why: str, ends: tuple[PeerLink, PeerLink]
) -> None:
    one, other = ends
    one.channel.send(kind, payload)
    with pytest.raises(ProtocolError, match=why):
        everything(other, 1)


def test_a_slice_of_another_length_is_refused(ends: tuple[PeerLink, PeerLink]) -> None:
    one, other = ends
    one.offer(head(AT, 1, given=True), None)
    one.channel.send(PART, b"1234")
    with pytest.raises(ProtocolError, match="PART with 4 bytes came out of turn"):
        everything(other, 1)


def test_a_connection_that_ends_inside_a_vector_leaves_no_offer(ends: tuple[PeerLink, PeerLink]) -> None:
    one, other = ends
    one.offer(head(AT, 1, given=True), V[:375])
    one.bury()
    with pytest.raises(Closed):
        everything(other, 1)
