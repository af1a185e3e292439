"""A task's command as a child of an engine's own process: it dies with it, and its output is read as it comes.

Engines that keep a Python process on every node (Ray's actors, Spark's workers) run this there. It is sent to them by
value, so that they need not load torch only to start a command.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

# the kernel ends the command with its parent, however rudely that goes; exec keeps the arrangement, and also what the
# parent has done with its signals: Ray's workers block SIGINT, and the last checkpoint is asked for by it
SHIM = """
import ctypes, os, signal, sys
signal.pthread_sigmask(signal.SIG_SETMASK, [])
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
    signal.signal(number, signal.SIG_DFL)
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.getppid() == int(sys.argv[1]) or os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""

Line = tuple[str, str]  # "out" or "err", and the text


class Running:
    """One command. To be begun by the main thread: the kernel takes the end of the thread for that of the parent."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], directory: str | None = None) -> None:
        here = directory if directory and Path(directory).is_dir() else None
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", SHIM, str(os.getpid()), *in_this_python(command)],
            env={**os.environ, **environment},
            cwd=here,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # signals for the engine's process are not for the command
        )
        self._streams = selectors.DefaultSelector()
        self._begun: dict[str, bytes] = {}
        for name, stream in (("out", self.process.stdout), ("err", self.process.stderr)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._streams.register(stream, selectors.EVENT_READ, name)
            self._begun[name] = b""

    def heard(self, seconds: float) -> tuple[list[Line], int | None]:
        """Lines since the last call, waited for at most so long; and the exit code when all has been read."""
        lines: list[Line] = []
        deadline = time.monotonic() + seconds
        while not lines and self._streams.get_map():  # no streams: closed, and the command may yet live
            # a command that has ended is not waited for: somebody else may hold its pipes open
            over = self.process.poll() is not None
            ready = self._streams.select(0 if over else max(0.0, min(0.2, deadline - time.monotonic())))
            for key, _ in ready:
                lines += self._read(key.fileobj, key.data)  # type: ignore[arg-type]
            if over and not ready:
                break
            if time.monotonic() >= deadline:
                return lines, None
        if lines or self.process.poll() is None:
            if not lines:  # its pipes are closed and it lives: there is nothing to select on
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(max(0.0, deadline - time.monotonic()))
            return lines, None
        lines = [(name, rest.decode(errors="replace")) for name, rest in self._begun.items() if rest]
        self._close()
        return lines, self.process.returncode

    def _read(self, stream: IO[bytes], name: str) -> list[Line]:
        piece = os.read(stream.fileno(), 1 << 16)
        if not piece:
            self._streams.unregister(stream)
            return []
        *whole, self._begun[name] = (self._begun[name] + piece).split(b"\n")
        return [(name, line.decode(errors="replace")) for line in whole]

    def tell(self, number: int) -> None:
        """Send a signal to the command itself; it knows what to tell its own children."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def end(self) -> None:
        """Kill it and everything that it has started in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._close()

    def _close(self) -> None:
        self._begun = {}
        self._streams.close()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


def in_this_python(command: Sequence[str]) -> list[str]:
    """`paceline …` by the interpreter that runs here, which need not be the one on the path."""
    words = list(command)
    return [sys.executable, "-P", "-m", "paceline", *words[1:]] if words[:1] == ["paceline"] else words


def free_port(host: str, allowed: tuple[int, int] | None = None) -> int:
    """A port of this address that nobody listens on at the moment; of `allowed`, the first and last of a range."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    for port in range(allowed[0], allowed[1] + 1) if allowed else [0]:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((host, port))
                probe.listen(1)
                return int(probe.getsockname()[1])
    first, last = allowed or (0, 0)
    raise OSError(errno.EADDRINUSE, f"all ports {first}-{last} of {host} are in use; give a wider range with --ports")


def why(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
