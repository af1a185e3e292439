"""Meetings among some of the workers, over connections between each two of them.

    every member:  offer to all others, with the vector to those that take it
                   wait for the offer of every other one; not for a worker that is dead or has finished the step
                   say to all others: "I have the vectors of these"; wait until each of these has said so too
                   those count that all of them have

A worker goes on when the others have its vector. So if a member dies, or a connection breaks, a member that is behind
has all that those ahead have used:

- Of two, each counts the other, or neither does that goes on; whenever one of them dies.
- Of more, all that go on count the same members if at most one of them dies inside the meeting. If several do, a member
  may count a dead one that another does not count; two living ones always agree about each other.

Nothing but the workers themselves is asked, unless a connection is to be made or a restarted worker to be taken in.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.errors import Deadlock, RunError, SchemeError
from paceline.network.means.meeting_links import MeetingLinks, MeetingPeer
from paceline.network.means.newcomers import Newcomers
from paceline.network.means.peer_connections import TROUBLE
from paceline.network.means.peer_link import Have, Lives, Occasion, Offer, PeerLink
from paceline.network.means.rendezvous import Rendezvous
from paceline.ops import Meet, Met
from paceline.processes.calls.client import Stopped
from paceline.processes.memory.board import FAILED, STOP
from paceline.processes.memory.packed_words import meeting_key, shape_word
from paceline.processes.memory.payload_codec import from_bytes, to_bytes
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.transport import WaitFor
from paceline.state import Vector

if TYPE_CHECKING:
    from paceline.network.means.distributed import Connected

LAST = 2.0  # seconds that the rest of a meeting may take to come when the run is stopped


class PartialMeeting:
    """A meeting that this worker has arrived at."""

    def __init__(self, op: Meet, v: Vector, number: int, first: bool, workers: tuple[int, ...], at: Occasion) -> None:
        self.op, self.v, self.number, self.first, self.workers, self.at = op, v, number, first, workers, at
        # compressed vectors travel as payloads
        self.sent = v if op.packed is None else to_bytes(op.packed.payloads[0])
        self.told: set[tuple[int, int]] = set()  # lives that this worker's offer was sent to
        self.counted: dict[int, Offer] | None = None  # the offers that this worker has, once it has said so
        self.have: Have | None = None
        self.met: Met | None = None
        self.took: dict[str, int] = {}  # the members, and which of its own meetings it was for each


class PartialMeetings:
    """One worker's side of all of them."""

    def __init__(
        self, memory: RunMemory, rank: int, wait_for: WaitFor, maker: Connected, rendezvous: Rendezvous
    ) -> None:
        self._memory, self._rank, self._board, self._wakeup = memory, rank, memory.board, memory.wakeup
        self._wait_for, self._rendezvous = wait_for, rendezvous
        self._hold = memory.plan.quorum == "hold"
        self._serverless = not memory.scheme.methods
        self._links = MeetingLinks(memory, rank, maker, rendezvous, made=self._connected, heard=self._advance)
        self._newcomers = Newcomers(memory, rank, wait_for, rendezvous, self._links)
        self.open: PartialMeeting | None = None
        self._counts: dict[int, int] = {}  # meetings of this step, by key
        self._at = (0, -1)  # generation and step that these are of

    def arrive(self, op: Meet, v: Vector, number: int, generation: int, *, first: bool) -> PartialMeeting:
        """Begin: offer the vector to those that are connected."""
        board, rank = self._board, self._rank
        assert op.among is not None
        workers = tuple(sorted(op.among))
        key = meeting_key(workers, op.t, generation)
        if self._at != (generation, op.t):
            self._at, self._counts = (generation, op.t), {}
        nth = self._counts[key] = self._counts.get(key, -1) + 1
        self.open = PartialMeeting(op, v, number, first, workers, Occasion(generation, op.t, key, nth))
        board.at_key[rank], board.at_shape[rank] = key, shape_word(v)
        board.first_await[rank], board.finished[rank] = first, number - 1
        board.at_seq[rank] = number
        # some may wait for this worker at a past step; members connect to it when they see that it has arrived
        alive, steps = board.alive, board.t
        self._wakeup.ring_those([r for r in range(board.workers) if alive[r] and (steps[r] < op.t or r in workers)])
        with self._links.lock:
            self._tend(self.open)
            self._advance()
        return self.open

    def carry_on(self) -> None:
        """The worker computes: the meeting must proceed without it."""
        self._links.carry_on()

    def leave(self, meeting: PartialMeeting) -> Met:
        """Wait until all members have the vectors that they take, and take what this worker does."""
        self._links.rest()
        try:
            self._wait_for(self._ready, "the others at a meeting")
        except Stopped:
            # a member that had this meeting and then ended the run has said so: it may still arrive
            if self._board.run[STOP] != FAILED:
                self._wakeup.wait(self._ready, min(LAST, self._memory.plan.patience / 4))
            if meeting.met is None:
                raise
        except Deadlock as error:
            if trouble := self._trouble(meeting):
                raise RunError(trouble) from error
            raise
        if meeting.met is None:
            assert self._links.error is not None
            raise self._links.error
        self._board.finished[self._rank] = meeting.number
        with self._links.lock:
            self.open = None
            for peer in self._links:
                peer.forget(meeting.at)
                peer.owes = False
                self._links.attend(peer)
            self._links.bury_ended()
        return meeting.met

    def invited(self, generation: int) -> bool:
        """For a worker that is back: whether it has got the cells of another one."""
        return self._newcomers.taken_in(generation)

    def forget(self) -> None:
        """The step was abandoned: this worker is at no meeting."""
        self.open, self._at = None, (0, -1)
        self._links.bury()
        self._newcomers.forget()

    # the others

    def _past(self, rank: int, meeting: PartialMeeting) -> bool:
        """Whether a worker has finished the step of a meeting. Until it has returned to the checkpoint like this one,
        its step on the board is of before the return, and says nothing."""
        return bool(self._board.t[rank] > meeting.at.t and self._board.followed[rank] == meeting.at.generation)

    def _absent(self, rank: int, meeting: PartialMeeting) -> bool:
        """Whether a worker is not waited for."""
        board = self._board
        if board.parted[rank] or board.gone[rank]:
            return True
        if not board.alive[rank]:
            if self._serverless and self._newcomers.waits(rank):
                return not meeting.first  # else it is taken in at the next step
            return not self._hold
        return self._past(rank, meeting)

    def _through(self, peer: MeetingPeer, meeting: PartialMeeting) -> bool:
        """Whether a member says nothing more of a meeting, because it has died or finished the step."""
        board = self._board
        return self._links.ended(peer) or bool(board.gone[peer.rank]) or self._past(peer.rank, meeting)

    def _offered(self, rank: int, at: Occasion) -> tuple[MeetingPeer, Offer] | None:
        return next(((peer, peer.offers[at]) for peer in self._links.of(rank) if at in peer.offers), None)

    # what happens at a meeting

    def _ready(self) -> bool:
        meeting = self.open
        assert meeting is not None
        with self._links.lock:
            self._tend(meeting)
            self._advance()
        if meeting.met is not None or self._links.error is not None:
            return True
        if meeting.first and self._serverless and any(self._board.joining):
            self._newcomers.welcome(meeting.workers, meeting.at.generation)
        return False

    def _tend(self, meeting: PartialMeeting) -> None:
        """Connect to members that have arrived, and offer them what this worker has brought."""
        board, links = self._board, self._links
        for rank in meeting.workers:
            life = board.life[rank]
            if rank == self._rank or life <= board.lost[rank]:
                continue
            peer = links.peer(rank, life)
            if peer.link is None or peer.building is not None:
                if board.at_key[rank] != meeting.at.key and peer.building is None:
                    continue
                try:
                    links.connect(peer, meeting.at.generation)
                except RunError as error:
                    links.error = links.error or error
            elif (rank, life) not in meeting.told:
                self._connected(peer, peer.link)

    def _connected(self, peer: MeetingPeer, link: PeerLink) -> None:
        """A connection is there: say what this worker has to say at its meeting."""
        self._newcomers.connected(peer, link)
        meeting = self.open
        if meeting is None or peer.rank not in meeting.workers or self._past(peer.rank, meeting):
            return
        op, v = meeting.op, meeting.sent
        given = peer.rank in op.to
        meeting.told.add((peer.rank, peer.life))
        head = Offer.packed(meeting.at, meeting.number, op.number, v, given=given)
        have = meeting.have
        self._links.send(peer, lambda link: link.offer(head, v if given else None))
        if have is not None:
            self._links.send(peer, lambda link: link.have(have))
        self._note_debt(peer, meeting)

    def _note_debt(self, peer: MeetingPeer, meeting: PartialMeeting) -> None:
        peer.owes = meeting.met is None and (meeting.at not in peer.offers or meeting.at not in peer.haves)
        self._links.attend(peer)

    def _advance(self) -> None:
        """Do what can be done now; with the lock held."""
        meeting = self.open
        if meeting is None or meeting.met is not None or self._links.error is not None:
            return
        if meeting.counted is None and not self._count(meeting):
            return
        assert meeting.counted is not None
        assert meeting.have is not None
        common: Lives = meeting.have.lives
        for rank in meeting.counted:
            if rank == self._rank:
                continue
            found = self._offered(rank, meeting.at)
            assert found is not None
            peer, _ = found
            self._note_debt(peer, meeting)
            if meeting.at in peer.haves:
                common &= peer.haves[meeting.at]
                if peer.link is not None and peer.link.channel.pending:
                    return  # it waits for what this worker has to say
            elif not self._through(peer, meeting):
                return
        self._take(meeting, common)

    def _count(self, meeting: PartialMeeting) -> bool:
        """If all members that are waited for have offered: say whose vectors this worker has."""
        offers: dict[int, Offer] = {}
        lives = {(self._rank, self._rendezvous.life)}
        for rank in meeting.workers:
            if rank == self._rank:
                continue
            if (found := self._offered(rank, meeting.at)) is not None:
                peer, offers[rank] = found
                lives.add((rank, peer.life))
            elif not self._absent(rank, meeting):
                return False
        for rank, offer in offers.items():
            self._check(rank, offer, meeting)
        if self._links.error is not None:
            return False
        meeting.counted = offers
        meeting.have = have = Have(meeting.at, frozenset(lives))
        for peer in self._links:  # also to those that are not counted: they must not count this worker
            if (peer.rank, peer.life) in meeting.told:
                self._links.send(peer, lambda link: link.have(have))
        return True

    def _check(self, rank: int, offer: Offer, meeting: PartialMeeting) -> None:
        """Refuse vectors of another length, and one that was not given."""
        error = None
        if meeting.op.packed is None and offer.shape != shape_word(meeting.v):
            error = "a mean of vectors of different lengths"
        elif rank in meeting.op.of and offer.vector is None:
            error = f"worker:{self._rank} takes the vector of worker {rank}, which does not give it"
        if error is not None:
            self._links.error = SchemeError(error)

    def _take(self, meeting: PartialMeeting, common: Lives) -> None:
        op, offers = meeting.op, meeting.counted
        assert offers is not None
        own = self._rank, self._rendezvous.life
        members = sorted(rank for rank, _ in common) if own in common else [self._rank]
        numbers = {rank: op.number if rank == self._rank else offers[rank].told for rank in members}
        vectors = {}
        for rank in members:
            if rank in op.of and (vector := offers[rank].vector) is not None:
                vectors[rank] = self._decoded(op, vector).view(op.v.shape).to(op.v.device)
        at = {rank: meeting.number if rank == self._rank else offers[rank].number for rank in members}
        meeting.took = {str(rank): number for rank, number in at.items()}
        meeting.met = Met(tuple(members), vectors, numbers)

    def _decoded(self, op: Meet, came: Tensor) -> Vector:
        if op.packed is None:
            return came
        sites = self._memory.compressed_sites()
        assert sites is not None
        return sites.compressor(None).decode(from_bytes(came), op.v)

    def _trouble(self, meeting: PartialMeeting) -> str:
        """Why a member cannot be reached, as one of the two has written it in the store; or why a worker that a member
        waits for cannot be."""
        named = [peer.name for peer in self._links if peer.rank in meeting.workers and peer.link is None and peer.name]
        lives = combinations(enumerate(self._board.life), 2)
        named += [self._links.name(meeting.at.generation, one, other) for one, other in lives]
        told = (self._rendezvous.store.peek(f"{name}/{TROUBLE}") for name in named)
        return next((text.decode(errors="replace") for text in told if text), "")
