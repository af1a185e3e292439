"""One task on a remote host, for `--on hosts`. Sent there by value over ssh: it needs only Python's standard library.

Stdin carries the orders, one line of JSON; after it a line every few seconds, so that a lost connection is noticed.
`stop` ends the task in order, `kill` at once; the end of stdin and silence count as `stop`.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from typing import Any

SILENCE = 30.0  # seconds without a line: the connection is lost
GRACE = 60.0  # seconds that a task may take to end in order
LOOK = 0.1


def environment_of(orders: dict[str, Any], here: dict[str, str]) -> dict[str, str]:
    """The task's environment. Other hosts reach this one at the address at which ssh has reached it."""
    environment: dict[str, str] = {**here, **orders["environment"]}
    words = here.get("SSH_CONNECTION", "").split()
    address = orders.get("listen") or (words[2].partition("%")[0] if len(words) == 4 else "")
    if address:
        try:
            loopback = ipaddress.ip_address(address).is_loopback
        except ValueError:  # a name
            loopback = False
        if orders.get("listen") or orders["one_host"] or not loopback:
            environment.setdefault("PACELINE_ADDRESS", address)
            if "PACELINE_HUB" not in orders["environment"]:  # this is the hub: it chooses the port
                environment["PACELINE_HUB"] = f"[{address}]:0" if ":" in address else f"{address}:0"
    return environment


class Far:
    """The command, its output, and the words that arrive on stdin."""

    def __init__(self, command: list[str], environment: dict[str, str], folder: str) -> None:
        self.process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder if os.path.isdir(folder) else None,  # noqa: PTH112
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL),  # ends with this process
        )
        self.streams = selectors.DefaultSelector()
        for stream, onto in ((self.process.stdout, 1), (self.process.stderr, 2)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self.streams.register(stream.fileno(), selectors.EVENT_READ, onto)
        self.streams.register(0, selectors.EVENT_READ, 0)
        self.heard, self.deadline = time.monotonic(), float("inf")
        signal.signal(signal.SIGTERM, lambda *_: self.stop())
        signal.signal(signal.SIGHUP, lambda *_: self.stop())

    def run(self) -> int:
        over = False
        while not over:
            over = self.process.poll() is not None  # then read only what is left: others may hold its pipes open
            for key, _ in self.streams.select(0 if over else LOOK):
                self.read(key.fd, key.data)
                over = False if key.data else over
            now = time.monotonic()
            if now > self.heard + SILENCE:
                self.stop()
            if now > self.deadline:
                self.kill()
        self.kill()  # what is left of its session
        code = self.process.wait()
        return code if code >= 0 else 128 - code

    def read(self, source: int, onto: int) -> None:
        piece = os.read(source, 1 << 16)
        if not piece:
            self.streams.unregister(source)
        if onto:
            while piece:
                try:
                    piece = piece[os.write(onto, piece) :]
                except OSError:  # the connection is lost; the task must not notice
                    return
            return
        self.heard = time.monotonic()
        if b"kill" in piece:
            self.kill()
        elif b"stop" in piece or not piece:
            self.stop()

    def stop(self) -> None:
        if self.deadline == float("inf"):
            self.deadline = time.monotonic() + GRACE
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


def main(command: list[str]) -> int:
    line = sys.stdin.buffer.readline(1 << 20)
    if not line.endswith(b"\n"):
        return 0  # stdin was closed before any orders
    orders = json.loads(line)
    try:
        far = Far(command, environment_of(orders, dict(os.environ)), orders["folder"])
    except OSError as error:
        print(f"{command[0]} cannot be run on this host: {error}", file=sys.stderr)
        return 127
    return far.run()


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.exit(main(sys.argv[1:]))
