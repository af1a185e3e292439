"""The store of another process, as torch.distributed wants one: workers find each other and agree with it."""

from __future__ import annotations

import _thread
import ssl
import time
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from paceline.network.secure.admission import Refused, enter
from paceline.network.secure.channel import Channel, Closed
from paceline.network.secure.store_server import ANSWER, LONGEST, REQUEST, Ask, StoreError, packed, unpacked

RETRY = 0.1  # seconds between two tries to reach the gate


class StoreClient(Store):
    """The store of another process, over a connection of its own; one request at a time. For `patience` seconds a lost
    connection is made again and the request repeated: only `add` could notice, which is not used where it matters."""

    def __init__(
        self, address: str, port: int, secret: bytes, *, patience: float = 30.0, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__()
        self._place, self._secret, self._patience, self._tls = (address, port), secret, patience, tls
        self._channel: Channel | None = None
        self._number = 0
        self._wait = patience
        self._lock = _thread.allocate_lock()  # torch asks from threads of its own

    # what torch.distributed calls

    def set(self, key: str, value: bytes | str) -> None:
        self._ask(Ask.SET, key.encode(), _bytes(value))

    def get(self, key: str) -> bytes:
        return self._ask(Ask.GET, key.encode(), seconds=self._wait)[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._wait if timeout is None else timeout.total_seconds()
        self._ask(Ask.WAIT, *(key.encode() for key in keys), seconds=seconds)

    def check(self, keys: list[str]) -> bool:
        return self._ask(Ask.CHECK, *(key.encode() for key in keys))[0] == b"1"

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(Ask.ADD, key.encode(), b"%d" % amount)[0])

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """The value afterwards; a missing key counts as an empty value."""
        return self._ask(Ask.COMPARE, key.encode(), _bytes(expected), _bytes(desired))[0]

    def delete_key(self, key: str) -> bool:
        return self._ask(Ask.DELETE, key.encode())[0] == b"1"

    def num_keys(self) -> int:
        return int(self._ask(Ask.COUNT)[0])

    def set_timeout(self, timeout: timedelta) -> None:
        self._wait = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._wait)

    # and what only we do

    def peek(self, key: str) -> bytes:
        """The value now; empty for a missing key."""
        found = self._ask(Ask.PEEK, key.encode())
        return found[0] if found else b""

    def clear(self, prefix: str) -> int:
        """Delete all keys with this prefix."""
        return int(self._ask(Ask.CLEAR, prefix.encode())[0])

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _ask(self, what: int, *fields: bytes, seconds: float | None = None) -> list[bytes]:
        self._number = number = (self._number + 1) % (1 << 32)
        until = time.monotonic() + (self._patience if seconds is None else seconds)
        with self._lock:
            while True:
                try:
                    return self._answered(packed(number, what, *fields), number, until)
                except (Closed, OSError) as error:
                    self.close()
                    if isinstance(error, TimeoutError) or time.monotonic() >= until:
                        raise TimeoutError(f"the store at {self._place[0]}:{self._place[1]}: {error}") from error
                    time.sleep(RETRY)

    def _answered(self, request: bytes, number: int, until: float) -> list[bytes]:
        if self._channel is None:
            left = max(until - time.monotonic(), RETRY)
            try:
                connection = enter(*self._place, self._secret, timeout=left, tls=self._tls)
            except Refused as error:
                raise StoreError(str(error)) from error
            self._channel = Channel(connection, limits={ANSWER: LONGEST})
        channel = self._channel
        channel.send(REQUEST, request)
        channel.flush(max(until - time.monotonic(), 0.0))
        while True:
            for _, message in channel.receive():
                answered, well, fields = unpacked(message)
                if answered != number:
                    continue  # to something that was given up
                if not well:
                    raise StoreError(fields[0].decode(errors="replace"))
                return fields
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError("no answer in time")
            channel.wait(left)


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
