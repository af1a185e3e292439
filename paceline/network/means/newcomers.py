"""How a restarted worker is taken in by a meeting among some: a worker that is about to meet it gives its cells.

Of the workers that wait for it at a meeting, the first one that writes its name in the store gives its cells; they
travel over the connection of the two. The others wait until it takes part. It continues at the step of the worker whose
cells it has: those that wait for it at an earlier step go on without it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from paceline.network.means.cell_handover import flat, own_cells, size_of, take_cells
from paceline.network.means.meeting_links import MeetingLinks, MeetingPeer
from paceline.network.means.peer_link import PeerLink
from paceline.network.means.rendezvous import Rendezvous
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.transport import WaitFor


class Newcomers:
    """One worker's side: it gives cells, or takes them."""

    def __init__(
        self, memory: RunMemory, rank: int, wait_for: WaitFor, rendezvous: Rendezvous, links: MeetingLinks
    ) -> None:
        self._memory, self._rank, self._board, self._wait_for = memory, rank, memory.board, wait_for
        self._rendezvous, self._links = rendezvous, links
        self._asked: dict[tuple[int, int], int] = {}  # lives that wait to be taken in: changes of the store by then
        self._mine: set[tuple[int, int]] = set()  # those that get the cells of this worker
        self._room: torch.Tensor | None = None  # for the cells that this worker takes

    def waits(self, rank: int) -> bool:
        """Whether a worker is restarted, and waits to take part."""
        board = self._board
        return bool(board.joining[rank] and board.life[rank] > board.lost[rank])

    def welcome(self, ranks: Iterable[int], generation: int) -> None:
        """Offer this worker's cells to those of these workers that wait to be taken in. It waits at the first meeting
        of its step meanwhile."""
        for rank in ranks:
            if not self.waits(rank):
                continue
            life = self._board.life[rank]
            changes = self._rendezvous.changes()
            if (rank, life) not in self._mine and self._asked.get((rank, life)) != changes:
                self._asked[rank, life] = changes
                me = f"{self._rank} {self._rendezvous.life}".encode()
                if self._rendezvous.store.compare_set(_key(generation, rank, life), b"", me) == me:
                    self._mine.add((rank, life))
                    self._rendezvous.ring()
            if (rank, life) in self._mine:
                with self._links.lock:
                    self._links.connect(self._links.peer(rank, life), generation)

    def connected(self, peer: MeetingPeer, link: PeerLink) -> None:
        """A connection has been made: cells go over it, or come."""
        if (peer.rank, peer.life) in self._mine and self._board.joining[peer.rank]:
            link.give_cells(flat(own_cells(self._memory, self._rank)))
        if self._room is not None:
            link.expect_cells(self._room)

    def taken_in(self, generation: int) -> bool:
        """For a worker that is back: whether another one has given it its cells, which it has now."""
        memory, board, store = self._memory, self._board, self._rendezvous.store
        key = _key(generation, self._rank, self._rendezvous.life)
        text = store.peek(key)
        if not text:
            return False
        donor, life = map(int, text.split())
        links = self._links
        peer = links.peer(donor, life)
        self._room = torch.empty(size_of(own_cells(memory, self._rank)), dtype=torch.uint8)
        peer.owes = True

        def there() -> bool:
            with links.lock:
                link = links.connect(peer, generation)
            return links.ended(peer) or bool(board.gone[donor]) or (link is not None and not link.cells_missing)

        try:
            self._wait_for(there, "the cells of another worker")
            link = peer.link
            if link is None or link.cells_missing:  # the donor has died: another one may give its cells
                store.compare_set(key, text, b"")
                self._rendezvous.ring()
                return False
            take_cells(memory, self._rank, self._room)
            return True
        finally:
            self._room, peer.owes = None, False
            links.attend(peer)

    def forget(self) -> None:
        self._asked.clear()
        self._mine.clear()


def _key(generation: int, rank: int, life: int) -> str:
    return f"{generation}/joins/{rank}/{life}"
