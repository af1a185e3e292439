"""A worker's connections to other workers, one for each life of each, made when both want them.

A connection that breaks is made again as long as both live: whether they do is said by the board, never by a
connection. What has come whole stays. The worker attends to the connections while it waits, a thread while it computes.
"""

from __future__ import annotations

import select
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import torch

from paceline.network.means.background_mover import BackgroundMover
from paceline.network.means.group import Broken, GroupBuilder, GroupRequest
from paceline.network.means.rendezvous import Rendezvous
from paceline.network.secure.channel import Channel, Closed, ProtocolError
from paceline.processes.memory.run_memory import RunMemory

if TYPE_CHECKING:
    from paceline.network.means.distributed import Connected

LARGEST = 4  # times the bytes of a worker's cells: a vector that is larger is not received
LEAST = 1 << 20  # bytes that a vector may always have


class Link(Protocol):
    """A connection, with messages of its own kinds."""

    channel: Channel

    def bury(self) -> None:
        """Close it."""


L = TypeVar("L", bound=Link)


class LinkedPeer(Generic[L]):
    """Another worker in one of its lives: the connection to it, and what it has said."""

    def __init__(self, rank: int, life: int) -> None:
        self.rank, self.life = rank, life
        self.link: L | None = None
        self.building: GroupBuilder[L] | None = None
        self.name = ""  # of the connection, in the store
        self.owes = False  # something that this worker waits for
        self.events = 0  # of the connection that are waited for


P = TypeVar("P", bound=LinkedPeer[Any])


class PeerLinks(ABC, Generic[P]):
    """`heard` is called, with the lock held, when something has come; `made` when a connection has been made."""

    kind: ClassVar[str]  # in the names of its connections
    purpose: ClassVar[str]  # in errors

    def __init__(
        self,
        memory: RunMemory,
        rank: int,
        maker: Connected,
        rendezvous: Rendezvous,
        *,
        made: Callable[[P, Any], None],
        heard: Callable[[], None],
    ) -> None:
        self._memory, self._rank, self._board, self._watch = memory, rank, memory.board, memory.wakeup
        self._maker, self._rendezvous, self._made, self._heard = maker, rendezvous, made, heard
        self.ring = rendezvous.wake
        self.lock = threading.RLock()  # a thread may be at it while the worker computes
        self._peers: dict[int, list[P]] = {}  # by rank, the newest life first
        self._mover: BackgroundMover | None = None
        self.error: Exception | None = None  # what the worker has to raise
        state = memory.worker_state(rank)
        cells = sum(state.cell(name).numel() * state.cell(name).element_size() for name in state)
        self.most = max(LARGEST * cells, LEAST)  # bytes of a vector that may come

    @abstractmethod
    def _peer(self, rank: int, life: int) -> P:
        """A peer to which there is no connection yet."""

    @abstractmethod
    def _link(self, connection: socket.socket) -> Any:
        """A connection that has been made."""

    @abstractmethod
    def _exchange(self, peer: P, link: Any) -> None:
        """Send what is pending, and take what has come."""

    def of(self, rank: int) -> list[P]:
        """The lives of a worker that this one has heard of, the newest first."""
        return self._peers.get(rank, [])

    def __iter__(self) -> Iterator[P]:
        return (peer for lives in list(self._peers.values()) for peer in lives)

    def peer(self, rank: int, life: int) -> P:
        lives = self._peers.setdefault(rank, [])
        if not lives or lives[0].life != life:
            lives.insert(0, self._peer(rank, life))
        return lives[0]

    def ended(self, peer: P) -> bool:
        """Whether this life has ended by force."""
        return bool(self._board.lost[peer.rank] >= peer.life or self._board.life[peer.rank] > peer.life)

    def connect(self, peer: P, generation: int) -> Any:
        """The connection, if there is one. Else make it, in a thread: the other side has to do so too."""
        if peer.building is not None and peer.building.over:
            building, peer.building = peer.building, None
            try:
                peer.link = building.group()
            except Broken:
                return None  # the next call tries again
            self._act(peer, partial(self._made, peer, peer.link))
        elif peer.link is None and peer.building is None:
            peer.building = self._build(peer, generation)
        return peer.link

    def name(self, generation: int, one: tuple[int, int], other: tuple[int, int]) -> str:
        """Of the connection between two lives, in the store."""
        (low, first), (high, second) = sorted([one, other])
        return f"{generation}/{self.kind}/{low}-{high}/{first}-{second}"

    def _build(self, peer: P, generation: int) -> GroupBuilder[Any]:
        own = self._rank, self._rendezvous.life
        peer.name = name = self.name(generation, own, (peer.rank, peer.life))
        self._maker.prepare(self._memory)
        rendezvous, store = self._rendezvous, self._rendezvous.borrow()
        pair = sorted([self._rank, peer.rank])
        place = pair.index(self._rank)

        def make(building: GroupBuilder[Any]) -> Any:
            cpu, wake = torch.device("cpu"), rendezvous.wake
            request = GroupRequest(store, name, pair, place, cpu, building, wake, self.purpose)
            try:
                connections = self._maker.connections(self._memory, request)
            except BaseException:
                store.close()
                raise
            rendezvous.give_back(store)
            return self._link(connections[1 - place])

        return GroupBuilder(make, rendezvous.wake)

    def send(self, peer: P, act: Callable[[Any], None]) -> None:
        """Send something, if the connection is there."""
        if (link := peer.link) is not None:
            self._act(peer, lambda: act(link))

    def _act(self, peer: P, act: Callable[[], None]) -> None:
        """Do something with a connection. One that breaks is dropped."""
        try:
            act()
        except (Closed, ProtocolError) as error:
            if isinstance(error, ProtocolError):
                print(f"{self.kind}: a connection to worker:{peer.rank} was given up: {error}", flush=True)
            self._drop(peer)
        except Exception as error:
            self.error = self.error or error
            self._drop(peer)
        self.attend(peer)

    def _drop(self, peer: P) -> None:
        if peer.building is not None:
            peer.building.give_up()
            peer.building = None
        if peer.link is not None:
            self._watched(peer, 0)
            peer.link.bury()
            peer.link = None

    def attend(self, peer: P) -> None:
        """Wait for what is to come from a peer and to go to it."""
        if (link := peer.link) is not None:
            self._watched(peer, (select.POLLIN if peer.owes else 0) | (select.POLLOUT if link.channel.pending else 0))

    def _watched(self, peer: P, events: int) -> None:
        assert peer.link is not None
        if events == peer.events:
            return
        descriptor = peer.link.channel.fileno()
        if not events:
            self._watch.ignore(descriptor)
        elif peer.events:
            self._watch.modify(descriptor, events)
        else:
            self._watch.attend(descriptor, partial(self._news, peer), events)
        peer.events = events

    def _news(self, peer: P) -> None:
        """A connection has brought something, or takes more."""
        with self.lock:
            if peer.link is not None:
                self._act(peer, partial(self._exchange, peer, peer.link))
            self._heard()

    def bury_ended(self) -> None:
        """Forget the lives that have ended."""
        for rank, lives in list(self._peers.items()):
            for peer in [peer for peer in lives if self.ended(peer)]:
                self._drop(peer)
                lives.remove(peer)
            if not lives:
                del self._peers[rank]

    def bury(self) -> None:
        """Close all connections."""
        with self.lock:
            for peer in self:
                self._drop(peer)
            self._peers.clear()
            self.error = None
        if self._mover is not None:
            self._mover.end()
            self._mover = None

    # while the worker computes

    def carry_on(self) -> None:
        if not self.idle():
            if self._mover is None:
                self._mover = BackgroundMover(self)
            self._mover.begin()

    def rest(self) -> None:
        """The worker attends to the connections itself from now on."""
        if self._mover is not None:
            self._mover.rest()

    def idle(self) -> bool:
        return self.error is not None or not any(peer.events for peer in self)

    def attended(self) -> dict[int, tuple[int, Callable[[], None]]]:
        with self.lock:
            watched = [peer for peer in self if peer.events and peer.link is not None]
            return {
                peer.link.channel.fileno(): (peer.events, partial(self._news, peer))
                for peer in watched
                if peer.link is not None
            }

    def proceed(self) -> None:
        """Nothing of a vector is sent before it is final: there is nothing to do."""
