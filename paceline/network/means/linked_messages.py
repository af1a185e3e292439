"""Messages that nobody waits for, between workers of different nodes.

    sender                                        receiver
    slot, in its own cells   -- head, vector -->  a copy, in memory of its process
    a copy of the note       <------ note ------  taken, in its own cells

Cells are what counts; connections only copy them. A message is sent when its step is finished, and a note when the step
is finished in which the message was taken. On a new connection each side sends all that the other may not have: the
messages that are not noted as taken, and its notes. What has come twice is recognised by its number. So a worker that
dies, or a connection that breaks, loses nothing and counts nothing twice.

A thread of its own attends to the connections, whatever the worker does.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from paceline.errors import RunError
from paceline.network.means.message_link import Head, Letter, MessageLink, Note
from paceline.network.means.peer_links import LinkedPeer, PeerLinks
from paceline.network.means.rendezvous import Rendezvous
from paceline.network.secure.channel import ProtocolError
from paceline.ops import MESSAGES
from paceline.processes.memory.payload_codec import from_bytes
from paceline.processes.memory.run_memory import RunMemory
from paceline.runtime.messages import CUT, NEVER, NUMBER, SEQUENCE, STEP, TO, MessageCells
from paceline.state import Vector

if TYPE_CHECKING:
    from paceline.network.means.distributed import Connected

Peer = LinkedPeer[MessageLink]
REACHABLE = 2  # steps that a worker makes while a connection to it is tried: then it is there, and is not reached


class MessageLinks(PeerLinks[Peer]):
    """The connections of one worker. `came` takes what has come from a peer, with the lock held."""

    kind = "mail"
    purpose = "messages"
    came: Callable[[Peer, Letter | Note], None]

    def _peer(self, rank: int, life: int) -> Peer:
        peer = Peer(rank, life)
        peer.owes = True  # a message may come at any time
        return peer

    def _link(self, connection: socket.socket) -> MessageLink:
        x: Vector = self._memory.worker_state(self._rank).x
        return MessageLink(connection, x.nbytes, self.most)

    def _exchange(self, peer: Peer, link: MessageLink) -> None:
        for came in link.exchange():
            self.came(peer, came)

    def attend(self, peer: Peer) -> None:
        """Have the thread look at a connection."""
        if (link := peer.link) is not None:
            events = select.POLLIN | (select.POLLOUT if link.channel.pending else 0)
            if events != peer.events:
                peer.events = events
                self.carry_on()
                assert self._mover is not None
                self._mover.wake()

    def _watched(self, peer: Peer, events: int) -> None:
        peer.events = events
        if self._mover is not None:
            self._mover.wake()


class LinkedMessages:
    """One worker's messages to and from the workers of other nodes."""

    def __init__(
        self, memory: RunMemory, rank: int, maker: Connected, rendezvous: Rendezvous, generation: Callable[[], int]
    ) -> None:
        self._memory, self._board, self._rank, self._generation = memory, memory.board, rank, generation
        self._x: Vector = memory.worker_state(rank).x
        self._own = MessageCells(rank, memory.worker_state(rank))
        self._copies: dict[int, MessageCells] = {}  # of other workers' cells: what they have sent here
        self._payloads: dict[int, tuple[int, Tensor]] = {}  # by slot: number and payload of a compressed message
        self._tried: dict[tuple[int, int], int] = {}  # lives, and their steps when a connection was first tried
        self._links = MessageLinks(memory, rank, maker, rendezvous, made=self._connected, heard=rendezvous.wake)
        self._links.came = self._came

    def cells(self, rank: int) -> MessageCells:
        """What is known here of the cells of a worker of another node. All of it is of finished steps."""
        if rank not in self._copies:
            vectors = [self._x[:0]] * MESSAGES
            numbers, heads = np.zeros((MESSAGES, 2)), np.zeros((MESSAGES, 4), dtype=np.int64)
            taken = np.zeros((self._memory.plan.workers * MESSAGES, 3), dtype=np.int64)
            self._copies[rank] = MessageCells.over(rank, vectors, numbers, heads, taken)
        return self._copies[rank]

    def packed(self, slot: int, payload: Tensor) -> None:
        """What stands for the vector of a slot on a connection, in bytes."""
        self._payloads[slot] = int(self._own.heads[slot, SEQUENCE]), payload

    def begin_step(self) -> None:
        """Connect to the workers of other nodes that take part."""
        board, links, generation = self._board, self._links, self._generation()
        if links.error is not None:
            raise links.error
        with links.lock:
            links.bury_ended()
            for rank in self._far():
                life = board.life[rank]
                present = board.alive[rank] and not board.parted[rank] and life > board.lost[rank]
                if present and board.followed[rank] == generation:
                    self._connect(links.peer(rank, life), generation)
        links.carry_on()  # the thread may have gone to sleep just before a connection was made

    def _connect(self, peer: Peer, generation: int) -> None:
        if peer.link is not None:
            return
        tried = self._tried.setdefault((peer.rank, peer.life), self._board.t[peer.rank])
        try:
            self._links.connect(peer, generation)
        except RunError:
            # it has perhaps not been at its first step yet, and has not tried
            if self._board.t[peer.rank] >= tried + REACHABLE:
                raise
            del self._tried[peer.rank, peer.life]

    def _far(self) -> Iterator[int]:
        return (rank for rank in range(self._memory.plan.workers) if not self._memory.beside(rank))

    def end_step(self, step: int) -> None:
        """A step is finished: send its messages, and its notes of messages that were taken."""
        own, links = self._own, self._links
        with links.lock:
            for peer in links:
                for slot in np.flatnonzero((own.heads[:, STEP] == step) & (own.heads[:, TO] == peer.rank)).tolist():
                    if own.heads[slot, SEQUENCE]:
                        links.send(peer, partial(self._send, slot))
                for slot in np.flatnonzero(self._notes(peer.rank)[:, STEP] == step).tolist():
                    links.send(peer, partial(self._note, peer.rank, slot))

    def _notes(self, rank: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """This worker's notes of the messages of another one."""
        notes: np.ndarray[tuple[int, int], np.dtype[np.int64]] = self._own.taken[
            rank * MESSAGES : (rank + 1) * MESSAGES
        ]
        return notes

    def _send(self, slot: int, link: MessageLink) -> None:
        own = self._own
        step, sequence, cut, _ = own.heads[slot].tolist()
        numbered, payload = self._payloads.get(slot, (0, None))
        # a process that was restarted has no payloads: it sends what they decode to, which has the same bits
        data = payload if payload is not None and numbered == sequence else own.vectors[slot]
        number = float(own.numbers[slot, NUMBER])
        link.message(Head(slot, sequence, cut, step, number, data.nbytes, int(data is payload)), data)

    def _note(self, rank: int, slot: int, link: MessageLink) -> None:
        _, sequence, cut = self._notes(rank)[slot].tolist()
        if sequence:
            link.note(Note(slot, sequence, cut))

    def _connected(self, peer: Peer, link: MessageLink) -> None:
        """A connection is there: send what the other one may not have. This worker is not inside a step."""
        self._tried.pop((peer.rank, peer.life), None)
        steps, known = self._board.t[self._rank], self.cells(peer.rank).taken
        for slot in range(MESSAGES):
            if self._notes(peer.rank)[slot, STEP] < steps:
                self._note(peer.rank, slot, link)
            step, sequence, _, to = self._own.heads[slot].tolist()
            if sequence > known[self._rank * MESSAGES + slot, SEQUENCE] and to == peer.rank and step < steps:
                self._send(slot, link)

    def _came(self, peer: Peer, came: Letter | Note) -> None:
        cells = self.cells(peer.rank)
        if isinstance(came, Note):
            note = cells.taken[self._rank * MESSAGES + came.slot]
            if came.sequence > note[SEQUENCE]:
                note[STEP] = NEVER
                note[SEQUENCE], note[CUT] = came.sequence, came.cut
                note[STEP] = 0
            return
        head = came.head
        row = cells.heads[head.slot]
        if head.sequence > max(row[SEQUENCE], self._notes(peer.rank)[head.slot, SEQUENCE]):
            row[STEP] = NEVER
            cells.vectors[head.slot] = self._vector(came)
            cells.numbers[head.slot, NUMBER] = head.number
            row[SEQUENCE], row[CUT], row[TO] = head.sequence, head.cut, self._rank
            row[STEP] = head.step

    def _vector(self, came: Letter) -> Vector:
        if not came.head.packed:
            return came.data.view(self._x.dtype)
        sites = self._memory.compressed_sites()
        if sites is None:
            raise ProtocolError("a compressed message, and this run compresses nothing")
        try:
            return sites.compressor(None).decode(from_bytes(came.data), self._x)
        except ValueError as error:
            raise ProtocolError(f"a payload that means nothing: {error}") from error

    def unsettled(self, reads: Callable[[int], bool]) -> bool:
        """Whether a message is under way to a worker of another node that still reads. Connections are made meanwhile;
        this worker is not inside a step."""
        self.begin_step()
        for slot, (_, sequence, _, to) in enumerate(self._own.heads.tolist()):
            known = int(self.cells(to).taken[self._rank * MESSAGES + slot, SEQUENCE]) if sequence else 0
            if sequence > known and not self._memory.beside(to) and reads(to):
                return True
        return False

    def forget(self) -> None:
        """The step was abandoned, or this worker does not take part for a while: all is sent again afterwards."""
        self._links.bury()
        self._copies.clear()
        self._payloads.clear()
        self._tried.clear()
