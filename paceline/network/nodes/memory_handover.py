"""Nodes of one host share their memory: a node that joins gets the descriptors of the first node on its host.

They are sent over an abstract Unix socket, which exists in this host's network namespace alone. Only a process of the
same user is served, and it has to prove the secret as any other connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import RunError
from paceline.network.secure.handshake import received

_NONCE = 32
_AT_ONCE = 250  # descriptors in one message, below the kernel's limit
_PATIENCE = 2.0  # seconds for a conversation within one host
_COUNT = struct.Struct("<I")


def identity() -> str:
    """Identifies a host: its running kernel, and the network namespace and the user of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{boot.read_text(encoding='ascii').strip()}/{Path('/proc/self/ns/net').readlink()}/{os.getuid()}"
    except OSError:
        return ""  # such a host shares nothing


def _place(run: str, node: int) -> str:
    return f"\0paceline-{run}-{node}"


def _received(connection: socket.socket, size: int) -> bytes:
    return received(connection, size, "another node of this host", time.monotonic() + _PATIENCE, "too early")


def _proof(secret: bytes, run: str, node: int, nonce: bytes) -> bytes:
    return hmac.digest(secret, b"beside" + run.encode() + _COUNT.pack(node) + nonce, hashlib.sha256)


class MemoryHandover:
    """Listens for other nodes of this host that ask for the memory of this node."""

    def __init__(self, run: str, node: int, secret: bytes, descriptors: Sequence[int]) -> None:
        self._run, self._node, self._secret, self._descriptors = run, node, secret, list(descriptors)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listening.bind(_place(run, node))
        except OSError:
            self._listening.close()
            raise
        self._listening.listen(64)
        self._listening.setblocking(False)

    def fileno(self) -> int:
        return self._listening.fileno()

    def pump(self) -> None:
        """Serve all that have connected."""
        while True:
            try:
                caller, _ = self._listening.accept()
            except OSError:
                return
            with caller, contextlib.suppress(OSError):
                self._serve(caller)

    def _serve(self, caller: socket.socket) -> None:
        credentials = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.getuid():
            return
        said = _received(caller, _NONCE + hashlib.sha256().digest_size)
        if not hmac.compare_digest(said[_NONCE:], _proof(self._secret, self._run, self._node, said[:_NONCE])):
            return
        caller.sendall(_COUNT.pack(len(self._descriptors)))
        for at in range(0, len(self._descriptors), _AT_ONCE):
            socket.send_fds(caller, [b"."], self._descriptors[at : at + _AT_ONCE])

    def close(self) -> None:
        self._listening.close()


def taken(run: str, node: int, secret: bytes, most: int) -> list[int]:
    """The descriptors of a node's memory, as this process's own. OSError: no node listens there."""
    found: list[int] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_PATIENCE)
        connection.connect(_place(run, node))
        nonce = os.urandom(_NONCE)
        connection.sendall(nonce + _proof(secret, run, node, nonce))
        (count,) = _COUNT.unpack(_received(connection, _COUNT.size))
        if count != most:
            raise RunError(f"a node of this host has {count} descriptors, not {most}: another paceline?")
        while len(found) < count:
            byte, received, *_ = socket.recv_fds(connection, 1, _AT_ONCE)
            if not byte:
                raise ConnectionResetError("it has closed")
            found += received
    return found
