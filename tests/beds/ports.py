"""A range of ports for a test whose subject is a range of ports; all other tests let the system choose."""

from __future__ import annotations

import contextlib
import os
import socket

from paceline.config.endpoint import Ports

LOCAL = "127.0.0.1"
_LOWEST, _HIGHEST = 10_000, 30_000  # below those that systems choose themselves


def free_range(count: int) -> Ports:
    """Ports in a row that nobody uses now. Processes that test at the same time begin at different places."""
    blocks = (_HIGHEST - _LOWEST) // count
    for number in range(blocks):
        first = _LOWEST + (os.getpid() * 7 + number) % blocks * count
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind((LOCAL, port))
            except OSError:
                continue
            return Ports(first, first + count - 1)
    raise AssertionError("no free range of ports")
