"""Authenticated connections: only a peer that proves that it knows the run's secret is admitted.

`AdmissionListener` listens. It never blocks, and an unknown peer costs it a few hundred bytes for a few seconds.
`enter` connects. The messages that both exchange are in handshake.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import ssl
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

from paceline.config.endpoint import PORTS, Ports
from paceline.errors import UsageError
from paceline.network.secure.handshake import Refused, TurnedAway, gate_side, left, prove

__all__ = ["AdmissionListener", "Refused", "enter", "listener"]

_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}  # what accept says when the system has no more
_PAUSE = 1.0  # seconds without accepting when it has; and between two lines of log


@dataclass
class _Stranger:
    connection: socket.socket
    peer: str
    since: float
    talk: Generator[None, None, None]


def listener(address: str, port: int | Ports | None = 0) -> socket.socket:
    """A socket that listens on this one address, and does not block. Port 0 or None: the system chooses one."""
    if not isinstance(port, Ports):
        return _listening(address, port or 0)
    for one in port:
        with contextlib.suppress(_InUse):
            return _listening(address, one)
    if not port.firm:
        return _listening(address, 0)
    taken = f"all ports {port} are in use" if port.last > port.first else f"port {port} is in use"
    raise UsageError(
        f"cannot listen on {address}: {taken}; give a wider range with {PORTS}, or end what listens there (ss -ltnp)"
    )


class _InUse(UsageError):
    """Another process listens on that port."""


def _listening(address: str, port: int) -> socket.socket:
    try:
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(f"cannot listen on {address!r}: {error.strerror}; give an address of this machine") from error
    try:
        listening = socket.create_server(place, family=family, backlog=128)
    except OSError as error:
        advice = {
            errno.EADDRINUSE: "another process listens there: end it, or give another port (0: any that is free)",
            errno.EADDRNOTAVAIL: "this machine does not have that address: give one that it has",
            errno.EACCES: "ports below 1024 are the system's: give a higher one (0: any that is free)",
        }.get(error.errno or 0, "give another address or port")
        kind = _InUse if error.errno == errno.EADDRINUSE else UsageError
        cause = os.strerror(error.errno or 0)
        raise kind(f"cannot listen on port {port} of {address}: {cause}; {advice}") from error
    listening.setblocking(False)
    return listening


class AdmissionListener:
    """Admits connections that prove the secret. `pump()` when `fileno()` is readable, and once a second. The descriptor
    stands for all handshakes and, unless the system has no descriptors left, the listening socket."""

    def __init__(
        self,
        listening: socket.socket,
        secret: bytes,
        *,
        tls: ssl.SSLContext | None = None,
        deadline: float = 5.0,
        most: int = 64,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listening, self._secret, self._tls = listening, secret, tls
        self._deadline, self._most, self._clock = deadline, most, clock
        self._strangers: list[_Stranger] = []  # the oldest first
        self._closed_until: float | None = None  # out of descriptors: accept no connection before
        self._complaints = _Complaints(log, clock)
        listening.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(listening, select.EPOLLIN)

    def __len__(self) -> int:
        """How many handshakes are under way."""
        return len(self._strangers)

    def fileno(self) -> int:
        return self._epoll.fileno()

    @property
    def exhausted(self) -> bool:
        """Whether the system had no descriptors left: then only `pump` accepts connections again."""
        return self._closed_until is not None

    def pump(self) -> list[socket.socket]:
        """Continue all handshakes; gives the admitted connections, from which nothing more has been read."""
        # older connections first: a crowd of newcomers must not push out one that has just proved the secret
        admitted = self._heard(self._strangers)
        admitted += self._heard(self._accepted())
        now = self._clock()
        while len(self._strangers) > self._most:
            self._turn_away(self._strangers[0], f"more than {self._most} handshakes were under way")
        for stranger in list(self._strangers):
            if now - stranger.since >= self._deadline:
                self._turn_away(stranger, f"it did not prove the secret within {self._deadline:g} s")
        self._complaints.repeat()
        return admitted

    def close(self) -> None:
        """Close the listening socket and all handshakes. Admitted connections stay open. Also for a forked child, which
        closes its copies of the parent's descriptors."""
        self._epoll.close()
        for stranger in self._strangers:
            stranger.talk.close()
            stranger.connection.close()
        self._strangers.clear()
        self._listening.close()

    def _accepted(self) -> list[_Stranger]:
        """Accept new connections, a few at a time: a crowd must leave each some rounds for its handshake."""
        new: list[_Stranger] = []
        now = self._clock()
        if self._closed_until is not None and now >= self._closed_until:
            self._closed_until = None
            self._epoll.register(self._listening, select.EPOLLIN)
        while self._closed_until is None and len(new) < max(1, self._most // 4):
            try:
                connection, place = self._listening.accept()
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._closed_until = now + _PAUSE
                    self._epoll.unregister(self._listening)
                    self._complaints.say(f"no connection can be accepted now: {error.strerror} (see `ulimit -n`)")
                break  # otherwise a peer that had gone before it was accepted
            connection.setblocking(False)
            peer = f"{place[0]}:{place[1]}"
            if self._tls is not None:
                try:
                    connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                except (OSError, ValueError) as error:
                    connection.close()
                    self._complaints.say(f"turned {peer} away: {_reason(error)}")
                    continue
            self._epoll.register(connection, select.EPOLLIN)
            new.append(_Stranger(connection, peer, now, gate_side(connection, self._secret)))
        self._strangers += new
        return new

    def _heard(self, strangers: list[_Stranger]) -> list[socket.socket]:
        admitted = []
        for stranger in list(strangers):
            try:
                next(stranger.talk)
            except StopIteration:
                self._strangers.remove(stranger)
                self._epoll.unregister(stranger.connection)
                _tune(stranger.connection)
                admitted.append(stranger.connection)
            except TurnedAway as why:
                self._turn_away(stranger, str(why))
            except (OSError, ValueError) as error:  # ssl speaks of a closed connection as a ValueError too
                self._turn_away(stranger, _reason(error))
        return admitted

    def _turn_away(self, stranger: _Stranger, why: str) -> None:
        self._strangers.remove(stranger)
        self._epoll.unregister(stranger.connection)
        stranger.talk.close()
        stranger.connection.close()
        self._complaints.say(f"turned {stranger.peer} away: {why}")


class _Complaints:
    """At most one line a second, with a count of those that were not written."""

    def __init__(self, log: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._log, self._clock = log, clock
        self._last = float("-inf")
        self._more = 0
        self._latest = ""

    def say(self, text: str) -> None:
        if self._more or self._clock() - self._last < _PAUSE:
            self._more, self._latest = self._more + 1, text
        else:
            self._write(text)

    def repeat(self) -> None:
        if self._more and self._clock() - self._last >= _PAUSE:
            count = f"; {self._more - 1} more before that" if self._more > 1 else ""
            self._write(self._latest + count)

    def _write(self, text: str) -> None:
        self._last, self._more = self._clock(), 0
        self._log(text)


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"):
        return "it does not speak TLS, which this side uses"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or 'the connection was closed'}"
    return (error.strerror if isinstance(error, OSError) else None) or "the connection was closed"


def _tune(connection: socket.socket) -> None:
    """Send small messages at once, and notice a peer whose machine is gone even without traffic."""
    with contextlib.suppress(OSError):  # the peer may be gone already: the next read raises
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        _set_tcp(connection, TCP_KEEPIDLE=20, TCP_KEEPINTVL=5, TCP_KEEPCNT=4)
        unpaced(connection)


def unpaced(connection: socket.socket) -> None:
    """Send to a process of this machine without pacing. BBR, which some systems use for all connections, spreads what
    is sent by timers: a vector of 400 KB then costs twice the processor time. Between machines the system decides."""
    here = connection.getsockname()[0] == connection.getpeername()[0]
    if here and hasattr(socket, "TCP_CONGESTION"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def notice_within(connection: socket.socket, seconds: float) -> None:
    """Have the system break this connection when the other side has not answered for `seconds`: otherwise it would
    keep sending to a route that is cut for a quarter of an hour."""
    quarter, limit = max(1, int(seconds / 4)), max(1, int(1000 * seconds))
    with contextlib.suppress(OSError):  # as in `_tune`
        _set_tcp(connection, TCP_USER_TIMEOUT=limit, TCP_KEEPIDLE=quarter, TCP_KEEPINTVL=quarter, TCP_KEEPCNT=3)


def _set_tcp(connection: socket.socket, **settings: int) -> None:
    for name, value in settings.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def enter(
    address: str, port: int, secret: bytes, *, timeout: float, tls: ssl.SSLContext | None = None
) -> socket.socket:
    """Connect to an AdmissionListener and prove the secret; blocking. OSError (TimeoutError): try again later."""
    until = time.monotonic() + timeout
    peer = f"{address}:{port}"
    connection = socket.create_connection((address, port), timeout)
    try:
        if connection.getsockname() == connection.getpeername():
            # no process listens there, and the system gave us that very port for our own end
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        _tune(connection)
        if tls is not None:
            connection.settimeout(left(until, peer))
            connection = tls.wrap_socket(connection)
        prove(connection, secret, peer, until)
    except ssl.SSLError as error:
        connection.close()
        raise _translated(error, peer) from error
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    return connection


def _translated(error: ssl.SSLError, peer: str) -> Exception:
    """An error of TLS: the other side is not the right one, or the connection broke."""
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError):
        return ConnectionResetError(errno.ECONNRESET, f"{peer} closed the connection during the TLS handshake")
    if isinstance(error, ssl.SSLCertVerificationError):
        return Refused(f"{peer} does not hold the cluster's certificate: {error.verify_message}")
    if error.reason in ("WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL"):
        return Refused(f"{peer} does not use TLS, this side does; all tasks must be started alike")
    return Refused(f"{peer} refused the TLS connection ({error.reason}); all nodes need the cluster's certificate")
