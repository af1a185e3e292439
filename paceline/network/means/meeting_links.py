"""A worker's connections to other workers for meetings among some, and what each has said there."""

from __future__ import annotations

import socket

from paceline.network.means.peer_link import Have, Lives, Occasion, Offer, PeerLink
from paceline.network.means.peer_links import LinkedPeer, PeerLinks


class MeetingPeer(LinkedPeer[PeerLink]):
    """Another worker in one of its lives, and what it has said of meetings."""

    def __init__(self, rank: int, life: int) -> None:
        super().__init__(rank, life)
        self.offers: dict[Occasion, Offer] = {}
        self.haves: dict[Occasion, Lives] = {}

    def forget(self, until: Occasion) -> None:
        """Forget what was said of a meeting, and of those at earlier steps."""
        for told in (self.offers, self.haves):
            for one in [one for one in told if one == until or one[:2] < until[:2]]:
                del told[one]


class MeetingLinks(PeerLinks[MeetingPeer]):
    """The connections of one worker."""

    kind = "link"
    purpose = "meetings"

    def _peer(self, rank: int, life: int) -> MeetingPeer:
        return MeetingPeer(rank, life)

    def _link(self, connection: socket.socket) -> PeerLink:
        return PeerLink(connection, self.most)

    def _exchange(self, peer: MeetingPeer, link: PeerLink) -> None:
        for came in link.exchange():
            if isinstance(came, Have):
                peer.haves[came.occasion] = came.lives
            else:
                peer.offers.setdefault(came.occasion, came)
