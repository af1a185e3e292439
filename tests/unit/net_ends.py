"""Both ends of a connection in one test: a gate that is pumped while somebody enters, pairs of sockets, a clock."""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from paceline.network.secure.admission import AdmissionListener, enter, listener

SECRET = bytes(range(32))
PATIENCE = 20.0  # seconds after which a test has failed; nothing takes so long


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Door:
    """A gate on loopback, what it has admitted, and what it has logged."""

    tls: ssl.SSLContext | None = None
    clock: Callable[[], float] = time.monotonic
    most: int = 64
    deadline: float = 5.0
    lines: list[str] = field(default_factory=list)
    admitted: list[socket.socket] = field(default_factory=list)

    def __post_init__(self) -> None:
        listening = listener("127.0.0.1")
        self.place: tuple[str, int] = listening.getsockname()
        self.gate = AdmissionListener(
            listening,
            SECRET,
            tls=self.tls,
            deadline=self.deadline,
            most=self.most,
            log=self.lines.append,
            clock=self.clock,
        )

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.close()
        for connection in self.admitted:
            connection.close()

    def pump(self, seconds: float = 0.05) -> None:
        select.select([self.gate], [], [], seconds)
        self.admitted += self.gate.pump()

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, "what was waited for did not happen"
            self.pump()

    def knock(self) -> socket.socket:
        return socket.create_connection(self.place, timeout=PATIENCE)

    def turned_away(self, stranger: socket.socket) -> bytes:
        """Pump until a stranger's connection is closed; gives what it was told before."""
        heard, closed = bytearray(), False

        def over() -> bool:
            nonlocal closed
            while not closed and select.select([stranger], [], [], 0)[0]:
                try:
                    piece = stranger.recv(4096)
                except ConnectionResetError:
                    piece = b""
                heard.extend(piece)
                closed = not piece
            return closed

        self.until(over)
        return bytes(heard)

    def let_in(
        self, secret: bytes = SECRET, tls: ssl.SSLContext | None = None, timeout: float = PATIENCE
    ) -> socket.socket:
        """`enter` from another thread, while this one pumps."""
        before = len(self.admitted)
        with ThreadPoolExecutor(1) as pool:
            entering = pool.submit(enter, *self.place, secret, timeout=timeout, tls=tls)
            self.until(entering.done)
            connection = entering.result()
        assert len(self.admitted) == before + 1
        return connection


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def exactly(connection: socket.socket, size: int) -> bytes:
    heard = b""
    while len(heard) < size:
        piece = connection.recv(size - len(heard))
        assert piece, f"closed after {len(heard)} of {size} bytes"
        heard += piece
    return heard
