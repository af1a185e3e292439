"""One `ssh HOST` with a task at its other end. `_ssh_remote.py` runs there, sent by value on stdin first of all."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from paceline.launchers import _ssh_remote
from paceline.processes.line_buffer import LineBuffer

LOST = 255  # exit code of ssh itself: no connection, or a lost one


def source() -> bytes:
    """The program for the remote end."""
    return Path(_ssh_remote.__file__).read_bytes()


class SshConnection:
    """The connection of one task; it can be started again after a loss."""

    def __init__(self, task: str, host: str, command: list[str]) -> None:
        self.task, self.host, self.deaths = task, host, 0
        self._command = command
        self.code: int | None = LOST  # None while it runs
        self.again = 0.0  # the time of the next start; 0: none is planned

    def start(self, streams: selectors.BaseSelector) -> None:
        self.process = subprocess.Popen(
            self._command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches only this process
        )
        self.code, self.began, self.again = None, time.monotonic(), 0.0
        self._lines = {"out": LineBuffer(), "err": LineBuffer()}
        self._streams, self.ordered = streams, False
        self._open: list[IO[bytes]] = []
        assert self.process.stdin is not None
        for name, stream in (("out", self.process.stdout), ("err", self.process.stderr)):
            assert stream is not None
            self._open.append(stream)
            os.set_blocking(stream.fileno(), False)
            streams.register(stream, selectors.EVENT_READ, (self, name))
        self.write(source())
        os.set_blocking(self.process.stdin.fileno(), False)

    def order(self, orders: dict[str, Any]) -> None:
        self.ordered = True
        self.write(json.dumps(orders).encode() + b"\n")

    def write(self, text: bytes) -> None:
        """Send bytes. Errors are ignored: the end of the connection is noticed by `reap`."""
        with suppress(OSError, ValueError):
            assert self.process.stdin is not None
            self.process.stdin.write(text)

    def close(self) -> None:
        """Close stdin: the task ends in order, unless it has ended."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()

    def read(self, name: str) -> list[str]:
        """The lines that have arrived; none after the end of the stream."""
        stream = self.process.stdout if name == "out" else self.process.stderr
        if stream is None or stream not in self._open:
            return []
        try:
            piece = os.read(stream.fileno(), 1 << 16)
        except BlockingIOError:
            return []
        if not piece:
            self._shut(stream)
            piece = b"\n" if self._lines[name].rest else b""
        return [line.decode(errors="replace") for line in self._lines[name].lines(piece)]

    def reap(self) -> list[tuple[str, str]] | None:
        """The last lines of each stream, if ssh has just ended. A shared connection of ssh may keep the pipes open."""
        if self.code is not None or self.process.poll() is None:
            return None
        self.code = 128 - self.process.returncode if self.process.returncode < 0 else self.process.returncode
        last = [(name, line) for name in ("out", "err") for line in _lines(self, name)]
        for stream in list(self._open):
            self._shut(stream)
        self.close()
        return last

    def _shut(self, stream: IO[bytes]) -> None:
        self._open.remove(stream)
        self._streams.unregister(stream)
        stream.close()


def _lines(link: SshConnection, name: str) -> Iterator[str]:
    while lines := link.read(name):
        yield from lines
