"""One `ssh HOST` with a task at its other end; `far.py` runs there, sent by value on stdin before all else."""

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

LOST = 255  # what ssh exits with when it is ssh that failed


def source() -> bytes:
    """The program of the far end."""
    return Path(_ssh_remote.__file__).read_bytes()


class SshConnection:
    """One task's connection: begun, heard, told, and begun again."""

    def __init__(self, task: str, host: str, command: list[str]) -> None:
        self.task, self.host, self.deaths = task, host, 0
        self._command = command
        self.code: int | None = LOST  # None while it lasts
        self.again = 0.0  # when it is to be started again

    def start(self, streams: selectors.BaseSelector) -> None:
        self.process = subprocess.Popen(
            self._command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is ours to hear
        )
        self.code, self.began, self.again = None, time.monotonic(), 0.0
        self._begun = {"out": b"", "err": b""}
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
        """What cannot be written is not: a connection that is gone shows by itself."""
        with suppress(OSError, ValueError):
            assert self.process.stdin is not None
            self.process.stdin.write(text)

    def close(self) -> None:
        """The task ends in order, unless it has."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()

    def read(self, name: str) -> list[str]:
        """Lines that are there by now; nothing once the pipe is at its end."""
        stream = self.process.stdout if name == "out" else self.process.stderr
        if stream is None or stream not in self._open:
            return []
        try:
            piece = os.read(stream.fileno(), 1 << 16)
        except BlockingIOError:
            return []
        if not piece:
            self._shut(stream)
            piece = b"\n" if self._begun[name] else b""
        *whole, self._begun[name] = (self._begun[name] + piece).split(b"\n")
        return [line.decode(errors="replace") for line in whole]

    def reap(self) -> list[tuple[str, str]] | None:
        """If it has just ended: the last lines of each stream. A connection that ssh shares may hold its pipes open."""
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
