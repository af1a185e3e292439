"""Some workers joined by connections of our own: authenticated, and encrypted where the run uses TLS.

Bytes go from the sender's vector into the receiver's memory without a copy between. Large vectors go in slices: as soon
as a slice of everybody's vector is there it is added up, and its mean sent, while the next ones come in. They go from
the end of the vector to its front, as autograd computes a gradient: a vector that is still being computed is sent as
far as it is final (`open_early`), by a thread. What comes of that is no mean before all members have sent their START.

What a peer may send is known from the vector that this worker has brought; nothing else is received. A peer may be one
step ahead: it has all that it needs of the mean under way, and begins the next. What it sends then is kept until this
worker is there too, and nothing more is read from it before.
"""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from paceline.errors import RunError, SchemeError
from paceline.network.means import mean_rooms
from paceline.network.means.background_mover import BackgroundMover
from paceline.network.means.group import HEAD, Broken, Exchange, Group, Header
from paceline.network.means.group_peer import EARLY, GIVEN, LIMITS, PART, START, SUM, GroupPeer, MeanMessage
from paceline.network.means.mean_rooms import Rooms, as_bytes, slices
from paceline.network.means.meeting_rooms import MeetingRooms
from paceline.network.secure.channel import Closed, ProtocolError
from paceline.processes.memory.wakeup import Wakeup
from paceline.state import Vector, mean_into

MOST_ROOMS = 16  # lengths of vectors for which memory is kept


class TcpGroup(Group):
    """The members are connected already. `watch` is used while the worker waits; `ring` wakes it from a thread."""

    any_length: ClassVar[bool] = True
    gathers: ClassVar[bool] = True

    def __init__(
        self, place: int, size: int, connections: dict[int, socket.socket], *, watch: Wakeup, ring: Callable[[], None]
    ) -> None:
        super().__init__(place, size)
        self._watch, self.ring = watch, ring
        self._lock = threading.RLock()  # a thread may be at it while the worker computes
        self._peers = [GroupPeer(other, connections[other], self._room) for other in sorted(connections)]
        self._rooms: dict[tuple[int, torch.dtype, bool], Rooms] = {}
        self._used: Rooms | MeetingRooms
        self._opened: Header | None = None  # of the exchange under way: this member's, as far as it is known
        self._headers: dict[int, Header] = {}
        self._weights: dict[int, float] = {}
        self._final = 0  # the index from which on this member's vector does not change any more
        self._passed = 0  # of the pieces, how many have been sent
        self._added = 0  # of the pieces that this member adds up, how many are done
        self._error: Exception | None = None
        self._buried = False
        self._mover: BackgroundMover | None = None

    # what the worker calls

    def start(self, v: Vector, header: Header) -> Exchange:
        v = v.detach().contiguous()
        with self._lock:
            self._open(v, header, 0)
            for peer in self._peers:
                self._send(peer, START, header.packed(), *([as_bytes(v)] if self.small else ()))
            self._headers[self.place] = header
            self._begun()
            self.proceed()
        return _UnderWay(self, self._all_sent if self.small else lambda: True, (START, PART))

    def start_meeting(self, v: Vector, header: Header, to: Sequence[int], of: Sequence[int]) -> Exchange:
        v = v.detach().contiguous()
        with self._lock:
            self._used = rooms = MeetingRooms(v, self.size, of)
            self.small, self._v, self._opened, self._final = False, v, header, 0
            self._passed = self._added = 0
            self._headers, self._weights = {self.place: header}, {self.place: header.weight}
            for peer in self._peers:
                peer.expect(START, [rooms.starts[peer.place]])
                if peer.place in rooms.vectors:
                    peer.expect(PART, slices(rooms.vectors[peer.place]))
                peer.due[EARLY] = deque()
            for peer in self._peers:
                self._send(peer, START, header.packed())
                for part in slices(v) if peer.place in to else ():
                    self._send(peer, PART, part)
            self._begun()
        return _UnderWay(self, self._all_sent, (START, PART))

    def met(self) -> dict[int, Vector]:
        assert isinstance(self._used, MeetingRooms)
        return self._used.vectors

    def confirm(self) -> Exchange:
        with self._lock:
            for peer in self._peers:
                peer.expect(GIVEN, [memoryview(bytearray(1))])
                self._send(peer, GIVEN, b"\1")
            self._begun()
        return _UnderWay(self, self._all_sent, (GIVEN,))

    def gather(self, data: Tensor, header: Header) -> Exchange:
        with self._lock:
            self._open(data, header, 0, gather=True)
            for peer in self._peers:
                self._send(peer, START, header.packed(), *([as_bytes(data)] if self.small else ()))
                for part in () if self.small else slices(data):
                    self._send(peer, PART, part)
            self._headers[self.place] = header
            self._begun()
        return _UnderWay(self, self._all_sent, (START, PART))

    def open_early(self, v: Vector, header: Header) -> Callable[[int], None] | None:
        if (
            v.numel() * v.element_size() * self.size <= mean_rooms.SMALL
            or not v.is_contiguous()
            or v.device.type != "cpu"
        ):
            return None
        v = v.detach()
        with self._lock:
            self._open(v, header, v.numel())
            for peer in self._peers:
                self._send(peer, EARLY, header.packed())
            self._begun()
        self.carry_on()
        return self._now_final

    def commit(self, header: Header) -> Exchange:
        if self._mover is not None:
            self._mover.rest()
        with self._lock:
            self._final = 0
            for peer in self._peers:
                self._send(peer, START, header.packed())
            self._headers[self.place] = header
            self.proceed()
        return _UnderWay(self, lambda: True, (START, PART))

    def _open(self, v: Vector, header: Header, final: int, *, gather: bool = False) -> None:
        """Expect what the others send for a mean of which `v` is this member's vector."""
        key = v.numel(), v.dtype, gather
        if key not in self._rooms:
            if len(self._rooms) >= MOST_ROOMS:
                del self._rooms[next(iter(self._rooms))]
            self._rooms[key] = Rooms(v, self.size, self.place, gather=gather)
        self._used = rooms = self._rooms[key]
        self.small, self._v, self._opened, self._final = rooms.small, v, header, final
        self._passed = self._added = 0
        self._headers, self._weights = {}, {self.place: header.weight}
        for peer in self._peers:
            peer.expect(START, [rooms.starts[peer.place]])
            peer.expect(PART, rooms.parts[peer.place])
            peer.expect(SUM, rooms.sums[peer.place])
            peer.due[EARLY] = deque([] if rooms.small else [rooms.previews[peer.place]])

    def _now_final(self, index: int) -> None:
        """The vector is final from this index on."""
        if self._passed < len(self._used.pieces) and self._used.pieces[self._passed].low >= index:
            assert self._mover is not None
            self._final = index
            self._mover.wake()

    def headers(self) -> list[Header]:
        return [self._headers[place] for place in range(self.size)]

    def rows(self) -> list[Tensor]:
        return list(self._used.rows)

    def start_second(self, weights: list[float]) -> Exchange:
        """It has begun already: slices are added up as they come."""
        return _UnderWay(self, lambda: self._all_sent() and self._added == len(self._used.mine), (SUM,))

    def large_mean(self, like: Vector) -> Vector:
        return self._used.whole

    def broadcast(self, tensor: Tensor, root: int) -> Exchange:
        parts = slices(tensor)
        with self._lock:
            for peer in self._peers:
                if self.place == root:
                    for part in parts:
                        self._send(peer, GIVEN, part)
                elif peer.place == root:
                    peer.expect(GIVEN, parts)
            self._begun()
        return _UnderWay(self, self._all_sent, (GIVEN,))

    def carry_on(self) -> None:
        if not self.idle():
            if self._mover is None:
                self._mover = BackgroundMover(self)
            self._mover.begin()

    def bury(self) -> None:
        with self._lock:
            if self._buried:
                return
            self._buried = True
            self._fail(Broken("this worker has left the group"))
            for peer in self._peers:
                self._watched(peer, 0)
                peer.channel.close()
        if self._mover is not None:
            self._mover.end()

    # what comes and goes

    def _begun(self) -> None:
        """Take what came early, and wait for the rest."""
        for peer in self._peers:
            self._guarded(peer, partial(self._take_early, peer))

    def proceed(self) -> None:
        """Send what has become final."""
        with self._lock:
            self._guarded(None, self._proceed)

    def _proceed(self) -> None:
        """Send the slices that are final, in the order of the pieces, and add up."""
        found = self._used.pieces
        while self._passed < len(found) and found[self._passed].low >= self._final:
            piece = found[self._passed]
            self._passed += 1
            for peer in self._peers:
                if piece.cut[peer.place]:
                    self._send(peer, PART, as_bytes(piece.slice_of(self._v, peer.place)))
        self._add_up()

    def _take_early(self, peer: GroupPeer) -> None:
        while peer.early and peer.due[peer.early[0][0]]:
            kind, payload = peer.early.popleft()
            self._place(peer, kind, len(payload))[:] = payload
            self._came(peer, kind)

    def _room(self, peer: GroupPeer, kind: int, length: int) -> memoryview | None:
        """Where a message goes that begins to come in; None: it is early."""
        in_turn = not peer.early and all(peer.placed)  # else one before it is still to be put in its place
        into = self._place(peer, kind, length) if in_turn and peer.due[kind] else None
        if into is None and in_turn and not peer.complete:
            if kind == EARLY:  # it has expected another mean than comes
                raise Broken("a member has begun another mean")
            raise ProtocolError(f"{MeanMessage(kind).name} came out of turn")
        peer.placed.append(into is not None)
        return into

    def _place(self, peer: GroupPeer, kind: int, length: int) -> memoryview:
        into = peer.due[kind].popleft()
        if kind == START and length != into.nbytes and HEAD <= length <= LIMITS[START]:
            raise SchemeError("a mean of vectors of different lengths")
        if length != into.nbytes:
            raise ProtocolError(f"{MeanMessage(kind).name} with {length:,} bytes; {into.nbytes:,} were to come")
        return into

    def news(self, peer: GroupPeer) -> None:
        """A connection has brought something, or takes more."""
        with self._lock:
            self._guarded(peer, lambda: self._exchange(peer))

    def _exchange(self, peer: GroupPeer) -> None:
        channel = peer.channel
        if channel.pending:
            channel.flush()
        if not peer.owes:
            return
        for kind, payload in channel.receive():
            if peer.placed.popleft():
                self._came(peer, kind)
            else:
                peer.early.append((kind, payload))
        self._take_early(peer)

    def _came(self, peer: GroupPeer, kind: int) -> None:
        """A message is where it belongs."""
        if kind != EARLY:
            peer.missing[kind] -= 1
        if kind in (START, EARLY):
            self._heard(peer, kind)
        if kind in (START, PART, EARLY):
            self._add_up()

    def _heard(self, peer: GroupPeer, kind: int) -> None:
        """What a member has said of its vector."""
        mine = self._opened
        assert mine is not None
        place = peer.place
        start = self._used.rows[place, :HEAD].numpy().tobytes()
        header = Header.unpacked(bytes(self._used.previews[place]) if kind == EARLY else start)
        if kind == EARLY and (header.shape, header.index) != (mine.shape, mine.index):
            raise Broken("a member has begun another mean")
        if header.shape != mine.shape:
            raise SchemeError("a mean of vectors of different lengths")
        if header.index != mine.index:
            raise RunError(f"mean {mine.index} meets mean {header.index} of another worker")
        # not the weight that slices may have been added up with: nobody sends this
        if self._weights.setdefault(place, header.weight) != header.weight:
            raise ProtocolError("a weight that differs from that of an early vector")
        if kind == START:
            self._headers[place] = header
            peer.due[EARLY].clear()

    def _add_up(self) -> None:
        """Those slices that are there of all members; their means go to all others."""
        if len(self._weights) < self.size:
            return
        mine = self._used.mine
        ready = len(mine) - max((peer.missing[PART] for peer in self._peers), default=0)
        weights = [self._weights[place] for place in range(self.size)]
        while self._added < ready and mine[self._added].low >= self._final:
            piece = mine[self._added]
            vectors = list(piece.slices)
            vectors[self.place] = piece.slice_of(self._v, self.place)
            mean_into(piece.slice_of(self._used.whole, self.place), vectors, weights)
            sent = self._used.sums[self.place][self._added]
            self._added += 1
            for peer in self._peers:
                self._send(peer, SUM, sent)

    def _send(self, peer: GroupPeer, kind: int, *parts: bytes | memoryview) -> None:
        self._guarded(peer, lambda: peer.channel.send(kind, *parts))

    def _guarded(self, peer: GroupPeer | None, act: Callable[[], None]) -> None:
        """Do something, with one connection or all. What goes wrong ends the exchange, and is raised where it is waited
        for."""
        if self._error is not None:
            return
        try:
            act()
        except (Closed, ProtocolError) as error:
            if isinstance(error, ProtocolError):
                print(f"means: a connection was given up: {error}", flush=True)
            self._fail(Broken(str(error)))
        except Exception as error:
            self._fail(error)
        if self._error is None and peer is not None:
            wanted = (select.POLLIN if peer.owes else 0) | (select.POLLOUT if peer.channel.pending else 0)
            self._watched(peer, wanted)

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        for peer in self._peers:
            self._watched(peer, 0)

    def _watched(self, peer: GroupPeer, events: int) -> None:
        if events == peer.events:
            return
        descriptor = peer.channel.fileno()
        if not events:
            self._watch.ignore(descriptor)
        elif peer.events:
            self._watch.modify(descriptor, events)
        else:
            self._watch.attend(descriptor, partial(self.news, peer), events)
        peer.events = events

    def _all_sent(self) -> bool:
        return not any(peer.channel.pending for peer in self._peers)

    def idle(self) -> bool:
        return self._error is not None or not any(peer.owes or peer.channel.pending for peer in self._peers)

    def attended(self) -> dict[int, tuple[int, Callable[[], None]]]:
        """The connections that something is to come from or to go to: the events to poll for, and what to do then."""
        with self._lock:
            waiting = [peer for peer in self._peers if peer.events]
            return {peer.channel.fileno(): (peer.events, partial(self.news, peer)) for peer in waiting}


class _UnderWay(Exchange):
    """Over when nothing of these kinds is to come any more, and what has to be done is done."""

    def __init__(self, group: TcpGroup, done: Callable[[], bool], kinds: tuple[int, ...]) -> None:
        self._group, self._done, self._kinds = group, done, kinds

    @property
    def over(self) -> bool:
        group = self._group
        with group._lock:
            if group._error is not None:
                return True
            return self._done() and not any(peer.missing[kind] for peer in group._peers for kind in self._kinds)

    def finish(self) -> None:
        if self._group._error is not None:
            raise self._group._error
