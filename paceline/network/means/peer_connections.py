"""Connections between the workers of a group: each has proved that it knows the run's secret, with TLS where the run
has it.

Every process that trains listens at one port of its node's address. The members of a group tell each other through the
store where; of two members the later one connects, and says first which connection of which group this is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from paceline.config.endpoint import Endpoint, Ports
from paceline.errors import RunError
from paceline.network.means.group import GroupRequest
from paceline.network.secure import tls
from paceline.network.secure.admission import AdmissionListener, Refused, enter, listener

TROUBLE = "trouble"  # the key, below that of a group, that says why the group cannot be formed
NAME = 32  # bytes: the name of a connection
AGAIN_AFTER = 0.05  # seconds between two tries to connect
REACH = 2.0  # that one try may take
LOOK = 1.0  # between two looks at whether a group is still wanted
ADVICE = "workers must be able to reach each other's ports (--ports fixes them)"
UNCLAIMED = 1024  # connections that no group has claimed yet; the oldest are closed


def name_of(group: str, to: int, by: int) -> bytes:
    """What the connection from one member of a group to another is called."""
    return hashlib.sha256(f"{group}\n{to}\n{by}".encode()).digest()


class PeerListener:
    """Accepts the connections of other workers, in a thread: strangers are turned away in time also while the worker
    computes."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        tls: ssl.SSLContext | None,
        log: Callable[[str], None],
        ports: Ports | None = None,
    ) -> None:
        listening = listener(address, ports)
        self.address, self.port = address, int(listening.getsockname()[1])
        self._gate = AdmissionListener(listening, secret, tls=tls, log=log)
        self._unnamed: dict[int, tuple[socket.socket, bytes]] = {}  # by descriptor: what it has said of its name
        self._named: dict[bytes, socket.socket] = {}  # the oldest first
        self._changed = threading.Condition()
        self._closed = False
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="means listener", daemon=True)
        self._thread.start()

    def take(self, name: bytes, wanted: Callable[[], bool], until: float) -> socket.socket:
        """The connection of that name, waited for as long as it is wanted; TimeoutError after `until`."""
        with self._changed:
            while True:
                if name in self._named:
                    return self._named.pop(name)
                if self._closed or not wanted():
                    raise ConnectionAbortedError("the connection is not wanted any more")
                left = until - time.monotonic()
                if left <= 0:
                    raise TimeoutError("it did not connect")
                self._changed.wait(min(left, LOOK))

    def close(self) -> None:
        self._closed = True
        self._wake.send(b"!")
        self._thread.join()
        self._wake.close()  # not by the thread: it may see `_closed` before it is woken
        self._woken.close()

    def _run(self) -> None:
        while not self._closed:
            poll = select.poll()
            for descriptor in (self._woken.fileno(), self._gate.fileno(), *self._unnamed):
                poll.register(descriptor, select.POLLIN)
            with self._changed:
                for connection in self._named.values():  # what it sends is for the group that claims it
                    poll.register(connection, select.POLLRDHUP)
            news = {descriptor for descriptor, _ in poll.poll(1000 * LOOK)}
            with self._changed:  # close those whose other side has gone before a group claimed them
                for name in [name for name, connection in self._named.items() if connection.fileno() in news]:
                    self._named.pop(name).close()
            for connection in self._gate.pump():
                connection.setblocking(False)
                self._unnamed[connection.fileno()] = connection, b""
            for descriptor in list(self._unnamed):
                self._hear(descriptor)
        self._gate.close()
        with self._changed:
            for connection in (*self._named.values(), *(connection for connection, _ in self._unnamed.values())):
                connection.close()
            self._named.clear()
            self._changed.notify_all()

    def _hear(self, descriptor: int) -> None:
        """Receive the name, and not a byte of what follows."""
        connection, name = self._unnamed[descriptor]
        try:
            piece = connection.recv(NAME - len(name))
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except (OSError, ValueError):
            piece = b""
        name += piece
        self._unnamed[descriptor] = connection, name
        if piece and len(name) < NAME:
            return
        del self._unnamed[descriptor]
        if not piece:
            connection.close()
            return
        with self._changed:
            before = self._named.pop(name, None)
            self._named[name] = connection
            if before is None and len(self._named) > UNCLAIMED:
                before = self._named.pop(next(iter(self._named)))
            if before is not None:
                before.close()
            self._changed.notify_all()


_listeners: dict[Endpoint, PeerListener] = {}
_making = threading.Lock()


def _say(text: str) -> None:
    print(f"means: {text}", flush=True)


def listener_of(node: Endpoint) -> PeerListener:
    """The listener of this process, made at the first call. Workers in one process share it."""
    assert node.store is not None, "a launcher that wants means across processes gives them a store"
    with _making:
        if node not in _listeners:
            made = PeerListener(node.address, node.store[2], tls.server_side(node), _say, node.ports)
            if node.ports is not None and made.port not in node.ports:
                _say(f"port {node.ports} is in use; listening on {made.port} instead")
            _listeners[node] = made
        return _listeners[node]


def connected(
    request: GroupRequest, own: PeerListener, secret: bytes, tls: ssl.SSLContext | None, *, patience: float
) -> dict[int, socket.socket]:
    """A connection to each other member, by its place. Whether members are alive is not decided here: RunError means
    that one of them could not be reached for `patience` seconds, though the group was wanted all the time."""
    place, group = request.place, request.name
    request.store.set(f"{group}/{place}", json.dumps([own.address, own.port]))
    until = time.monotonic() + patience
    found: dict[int, socket.socket] = {}
    try:
        for other in range(place):
            found[other] = _reached(request, other, secret, tls, until)
        for other in range(place + 1, len(request.members)):
            try:
                found[other] = own.take(name_of(group, place, other), lambda: request.building.wanted, until)
            except TimeoutError:
                raise RunError(
                    f"worker:{request.members[other]} did not connect to worker:{request.members[place]} at "
                    f"{own.address}:{own.port} for {request.purpose} within {patience:g} s; {ADVICE}"
                ) from None
    except BaseException:
        for connection in found.values():
            connection.close()
        raise
    return found


def _reached(
    request: GroupRequest, other: int, secret: bytes, tls: ssl.SSLContext | None, until: float
) -> socket.socket:
    """A connection to an earlier member. It is tried again and again: the member's port may belong to another process
    for a moment, if it has just died. The store gets the trouble meanwhile, for members that only wait."""
    store, group, place = request.store, request.name, request.place
    where: tuple[str, int] | None = None
    told = ""
    while request.building.wanted:
        try:
            if where is None:
                store.wait([f"{group}/{other}"], timedelta(seconds=LOOK))
                address, port = json.loads(store.get(f"{group}/{other}"))
                where = str(address), int(port)
            connection = enter(*where, secret, timeout=REACH, tls=tls)
            with contextlib.ExitStack() as closing:
                closing.callback(connection.close)
                connection.settimeout(REACH)
                connection.sendall(name_of(group, other, place))
                closing.pop_all()
            if told:
                store.delete_key(f"{group}/{TROUBLE}")
            return connection
        except (OSError, Refused) as error:
            at = f" at {where[0]}:{where[1]}" if where is not None else ""
            members = f"worker:{request.members[place]} cannot reach worker:{request.members[other]}"
            trouble = f"{members}{at} for {request.purpose}: {error}; {ADVICE}"
            if time.monotonic() >= until:
                raise RunError(trouble) from error
            if where is not None and trouble != told:
                store.set(f"{group}/{TROUBLE}", trouble)
                told = trouble
            time.sleep(AGAIN_AFTER)
    raise ConnectionAbortedError("the group is not wanted any more")
