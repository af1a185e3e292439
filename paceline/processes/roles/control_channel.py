"""Messages of a role to its launcher: JSON lines over a socket pair."""

from __future__ import annotations

import _thread
import contextlib
import json
import socket
from typing import Any

from paceline.processes.line_buffer import LineBuffer

LONGEST = 1 << 22  # bytes of one line


class Control:
    """A role's end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = _thread.allocate_lock()  # a process may host several workers: lines must stay whole

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        # should the launcher be gone, the kernel is about to end this process too
        with self._lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")


class Listener:
    """The launcher's end: whole messages out of whatever has arrived."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.setblocking(False)
        self._buffer = LineBuffer(LONGEST)

    def messages(self) -> list[dict[str, Any]]:
        """All that is there by now."""
        found: list[dict[str, Any]] = []
        while True:
            try:
                data = self.connection.recv(1 << 16)
            except (BlockingIOError, ConnectionResetError):
                break
            if not data:
                break
            found += self._whole(data)
        return found

    def wait(self) -> tuple[list[dict[str, Any]], bool]:
        """Wait for the next messages; False when the other end has closed."""
        data = self.connection.recv(1 << 16)
        return self._whole(data), bool(data)

    def _whole(self, data: bytes) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._buffer.lines(data) if line]
