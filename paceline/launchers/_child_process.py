"""A command as a child process whose output is read line by line: a task under an engine's process, or ssh.

Engines that have a Python process on every node (Ray's actors, Spark's workers) run this there. It is sent by value, so
that they do not load torch only to start a command: it imports the standard library and modules that are sent, too.
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

from paceline.processes import line_buffer
from paceline.processes.line_buffer import LineBuffer

# The kernel ends the command when its parent ends, even by SIGKILL; exec keeps that. exec also keeps the signal mask of
# the parent, so it is reset: Ray's workers block SIGINT, the signal that asks for a last checkpoint.
SHIM = """
import ctypes, os, signal, sys
signal.pthread_sigmask(signal.SIG_SETMASK, [])
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
    signal.signal(number, signal.SIG_DFL)
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.getppid() == int(sys.argv[1]) or os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""

BY_VALUE = (line_buffer, sys.modules[__name__])  # modules that engines send to other machines
Line = tuple[str, str]  # "out" or "err", and the text


class Running:
    """One command. It ends with this process: the kernel kills it, or (`talk`) its stdin, a pipe, is closed.
    Start it in the main thread: the kernel takes the end of the starting thread for the parent's."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], directory: str = "", talk: bool = False
    ) -> None:
        shim = () if talk else (sys.executable, "-I", "-S", "-c", SHIM, str(os.getpid()))
        self.process = subprocess.Popen(
            [*shim, *in_this_python(command)],
            bufsize=0,
            env={**os.environ, **environment},
            cwd=directory if directory and Path(directory).is_dir() else None,
            stdin=subprocess.PIPE if talk else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # signals to this process group do not reach the command
        )
        self._streams = selectors.EpollSelector()  # itself a descriptor that can be waited on
        self._lines: dict[str, LineBuffer] = {}
        for name, stream in (("out", self.process.stdout), ("err", self.process.stderr)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._streams.register(stream, selectors.EVENT_READ, name)
            self._lines[name] = LineBuffer()

    def fileno(self) -> int:
        return self._streams.fileno()

    def heard(self, seconds: float) -> tuple[list[Line], int | None]:
        """New lines, waited for at most `seconds`; and the exit code once all output has been read."""
        lines: list[Line] = []
        deadline = time.monotonic() + seconds
        while not lines and self._streams.get_map():  # empty: both closed, though the command may still run
            # once the command has ended, do not wait: another process may hold its pipes open
            over = self.process.poll() is not None
            ready = self._streams.select(0 if over else max(0.0, min(0.2, deadline - time.monotonic())))
            for key, _ in ready:
                piece = os.read(key.fd, 1 << 16)
                if not piece:
                    self._streams.unregister(key.fileobj)
                lines += [(key.data, line.decode(errors="replace")) for line in self._lines[key.data].lines(piece)]
            if over and not ready:
                break
            if time.monotonic() >= deadline:
                return lines, None
        if lines or self.process.poll() is None:
            if not lines:  # it runs with closed pipes: there is nothing to select on
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(max(0.0, deadline - time.monotonic()))
            return lines, None
        lines = [(name, buffer.rest.decode(errors="replace")) for name, buffer in self._lines.items() if buffer.rest]
        self._close()
        return lines, self.process.returncode

    def tell(self, number: int) -> None:
        """Send a signal to the command itself, which passes it on to its children as needed."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def end(self) -> None:
        """Kill the command and every process of its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._close()

    def _close(self) -> None:
        self._streams.close()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


def in_this_python(command: Sequence[str]) -> list[str]:
    """`paceline …` with the interpreter that runs here, which may differ from the one on PATH."""
    words = list(command)
    return [sys.executable, "-P", "-m", "paceline", *words[1:]] if words[:1] == ["paceline"] else words


def free_port(host: str, allowed: tuple[int, int] | None = None) -> int:
    """A port of this address that is free at the moment; within `allowed`, the first and last of a range."""
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
    """How a process ended, as text."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
