"""Members of a group for means in one test: a thread for each, real connections on loopback, a store, wakeups."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from net_ends import PATIENCE, SECRET

from paceline.network.means.group import Exchange, GroupBuilder, GroupRequest, Header
from paceline.network.means.peer_connections import PeerListener, connected
from paceline.network.means.tcp_group import TcpGroup
from paceline.network.secure.admission import AdmissionListener, listener
from paceline.network.secure.store_client import StoreClient
from paceline.network.secure.store_server import StoreServer
from paceline.processes.memory.board import Board
from paceline.processes.memory.wakeup import Wakeup
from paceline.state import Vector

LOCAL = "127.0.0.1"
Contexts = tuple[Any, Any]  # of TLS: for the side that listens, for the side that connects
PLAIN: Contexts = (None, None)


@contextlib.contextmanager
def store_desk() -> Iterator[int]:
    """A store, served by a thread; gives its port."""
    listening = listener(LOCAL)
    port = int(listening.getsockname()[1])
    desk = StoreServer(AdmissionListener(listening, SECRET, log=lambda _: None), (LOCAL, port, SECRET))
    over = threading.Event()

    def serve() -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(desk, selectors.EVENT_READ)
            while not over.is_set():
                selector.select(0.05)
                desk.pump()
        desk.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield port
    finally:
        over.set()
        thread.join()


@dataclass
class Company:
    """All members of a run, of whom groups can be made."""

    size: int
    tls: Contexts
    port: int
    lines: list[str] = field(default_factory=list)  # what the listeners have logged

    def __post_init__(self) -> None:
        self.board = Board.create(self.size, 0)
        self.ends = Wakeup.create(self.board.roles)
        self.wakeup = [Wakeup(self.board, self.ends, rank) for rank in range(self.size)]
        self.listeners = [PeerListener(LOCAL, SECRET, self.tls[0], self.lines.append) for _ in range(self.size)]
        self.pool = ThreadPoolExecutor(self.size)

    def close(self) -> None:
        self.pool.shutdown()
        for one in self.listeners:
            one.close()
        for end in self.ends:
            os.close(end)
        os.close(self.board.descriptor)

    def joined(self, name: str, patience: float = PATIENCE) -> list[TcpGroup]:
        return self.each(lambda place: self.join(name, place, patience))

    def join(self, name: str, place: int, patience: float) -> TcpGroup:
        building = self.building(name, place, patience)
        until(lambda: building.over, "the group is made, or not", 2 * PATIENCE)
        return building.group()

    def building(self, name: str, place: int, patience: float) -> GroupBuilder[TcpGroup]:
        members, cpu = list(range(self.size)), torch.device("cpu")
        wakeup = self.wakeup[place]

        def ring() -> None:
            wakeup.ring(place)

        def make(building: GroupBuilder[TcpGroup]) -> TcpGroup:
            store = StoreClient(LOCAL, self.port, SECRET, patience=PATIENCE)
            request = GroupRequest(store, name, members, place, cpu, building, ring)
            try:
                found = connected(request, self.listeners[place], SECRET, self.tls[1], patience=patience)
            finally:
                store.close()
            return TcpGroup(place, self.size, found, watch=wakeup, ring=ring)

        return GroupBuilder(make, ring)

    def each(self, act: Callable[[int], Any]) -> list[Any]:
        """Have every member do something at the same time, in a thread of its own."""
        tasks = [self.pool.submit(act, place) for place in range(self.size)]
        return [task.result(PATIENCE) for task in tasks]

    def wait(self, place: int, exchange: Exchange) -> None:
        assert self.wakeup[place].wait(lambda: exchange.over, PATIENCE), "the exchange does not end"
        exchange.finish()

    def mean(self, group: TcpGroup, v: Vector, header: Header) -> Vector:
        """One member's part in a mean, from beginning to end."""
        return self.finished(group, v, group.start(v, header))

    def finished(self, group: TcpGroup, v: Vector, first: Exchange) -> Vector:
        """The mean, once the first half is over."""
        self.wait(group.place, first)
        weights = [one.weight for one in group.headers()]
        if group.small:
            return group.small_mean(v, weights)
        self.wait(group.place, group.start_second(weights))
        return group.large_mean(v).clone()


@contextlib.contextmanager
def company(size: int, tls: Contexts = PLAIN) -> Iterator[Company]:
    """Afterwards no thread is left."""
    before = threading.active_count()
    with store_desk() as port:
        made = Company(size, tls, port)
        try:
            yield made
        finally:
            made.close()
    until(lambda: threading.active_count() == before, "all threads have ended")


def until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        pause.wait(0.005)


class Recorder:
    """Passes on all that comes and goes between those who connect to it and a place, and keeps it."""

    def __init__(self, place: tuple[str, int]) -> None:
        self.heard = bytearray()
        self._place, self._over = place, threading.Event()
        self._server = socket.create_server((LOCAL, 0))
        self.port = int(self._server.getsockname()[1])
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        pairs: dict[socket.socket, socket.socket] = {}
        while not self._over.is_set():
            for one in select.select([self._server, *pairs], [], [], 0.05)[0]:
                if one is self._server:
                    near, far = self._server.accept()[0], socket.create_connection(self._place)
                    pairs |= {near: far, far: near}
                    continue
                with contextlib.suppress(OSError):
                    piece = one.recv(1 << 16)
                    self.heard += piece
                    if piece:
                        pairs[one].sendall(piece)
                        continue
                other = pairs.pop(one)
                pairs.pop(other, None)
                one.close()
                other.close()
                break
        for one in (self._server, *pairs):
            one.close()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
