"""A key-value store for the workers of a run, served over authenticated connections only.

`KeyValueStore` holds the values, `StoreServer` serves them from the loop of the process that holds it. The client is in
store_client.py.
"""

from __future__ import annotations

import contextlib
import selectors
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum

from paceline.errors import PacelineError
from paceline.network.secure.admission import AdmissionListener
from paceline.network.secure.channel import Channel, Closed, ProtocolError

REQUEST, ANSWER = 1, 2  # kinds of messages
LONGEST = 1 << 20  # bytes of a message
MOST_KEYS = 100_000
MOST_BYTES = 64 << 20  # of all that is kept
MOST_WAITING = 1024  # requests of one client that wait for a key; the oldest are forgotten

_HEAD = struct.Struct("<IB")  # number of the request; what is asked, or whether it went well
_LENGTH = struct.Struct("<I")

Reply = Callable[[bytes], None]


class Ask(IntEnum):
    """What can be asked."""

    SET, GET, PEEK, ADD, CHECK, WAIT, COMPARE, DELETE, COUNT, CLEAR = range(10)


class StoreError(PacelineError):
    """What was asked of the store cannot be done."""


def packed(number: int, what: int, *fields: bytes) -> bytes:
    return _HEAD.pack(number, what) + b"".join(_LENGTH.pack(len(field)) + field for field in fields)


def unpacked(message: bytes | bytearray) -> tuple[int, int, list[bytes]]:
    """The number, what is asked or whether it went well, and the fields; ProtocolError for anything else."""
    if len(message) < _HEAD.size:
        raise ProtocolError(f"a message of {len(message)} bytes is too short for the store")
    number, what = _HEAD.unpack_from(message)
    fields, at = [], _HEAD.size
    while at < len(message):
        end = at + _LENGTH.size
        length = _LENGTH.unpack_from(message, at)[0] if end <= len(message) else len(message)
        if end + length > len(message):
            raise ProtocolError("a field of a message for the store reaches beyond its end")
        fields.append(bytes(message[end : end + length]))
        at = end + length
    return number, what, fields


class KeyValueStore:
    """Bytes by name. It knows no sockets: a request comes in, and its reply goes out now or when a key is there."""

    def __init__(self, *, most_keys: int = MOST_KEYS, most_bytes: int = MOST_BYTES) -> None:
        self._values: dict[bytes, bytes] = {}
        self._size = 0
        self._most_keys, self._most_bytes = most_keys, most_bytes
        self._waiting: dict[Reply, dict[int, tuple[list[bytes], bool]]] = {}  # keys, and whether the value is wanted

    def __len__(self) -> int:
        return len(self._values)

    def handle(self, request: bytes | bytearray, reply: Reply) -> None:
        """`reply` also identifies the client: it must be the same one for all its requests."""
        number, what, fields = unpacked(request)
        try:
            answer = self._answer(number, what, fields, reply)
        except StoreError as error:
            reply(packed(number, 0, str(error).encode()))
            return
        except (ValueError, TypeError, IndexError) as error:  # too few fields, or no number where one must be
            raise ProtocolError(f"request {what} of the store does not have {len(fields)} such fields") from error
        if answer is not None:
            reply(packed(number, 1, *answer))

    def drop(self, client: Reply) -> None:
        """A client has gone: drop what it waits for."""
        self._waiting.pop(client, None)

    def _answer(self, number: int, what: int, fields: list[bytes], reply: Reply) -> Sequence[bytes] | None:
        values = self._values
        match what:
            case Ask.SET:
                key, value = fields
                self._put(key, value)
                return ()
            case Ask.GET | Ask.WAIT:
                if what == Ask.GET:
                    (key,) = fields
                if all(key in values for key in fields):
                    return (values[fields[0]],) if what == Ask.GET else ()
                queue = self._waiting.setdefault(reply, {})
                queue[number] = (fields, what == Ask.GET)
                while len(queue) > MOST_WAITING:
                    del queue[next(iter(queue))]
                return None
            case Ask.PEEK:
                (key,) = fields
                return (values[key],) if key in values else ()
            case Ask.ADD:
                key, amount = fields
                total = b"%d" % (int(values.get(key, b"0")) + int(amount))
                self._put(key, total)
                return (total,)
            case Ask.CHECK:
                return (b"1" if all(key in values for key in fields) else b"0",)
            case Ask.COMPARE:
                key, expected, desired = fields
                if values.get(key, b"") != expected:
                    return (values.get(key, expected),)
                self._put(key, desired)
                return (desired,)
            case Ask.DELETE:
                (key,) = fields
                return (b"1" if self._forget(key) else b"0",)
            case Ask.COUNT:
                return (b"%d" % len(values),)
            case Ask.CLEAR:
                (prefix,) = fields
                found = [key for key in values if key.startswith(prefix)]
                for key in found:
                    self._forget(key)
                return (b"%d" % len(found),)
            case _:
                raise ProtocolError(f"the store does not know request {what}")

    def _put(self, key: bytes, value: bytes) -> None:
        size = self._size + len(value) - len(self._values.get(key, b""))
        size += 0 if key in self._values else len(key)
        if size > self._most_bytes or (key not in self._values and len(self._values) >= self._most_keys):
            raise StoreError(f"the store is full: {len(self._values):,} keys, {self._size:,} bytes")
        self._size, self._values[key] = size, value
        for reply, queue in list(self._waiting.items()):
            for number, (keys, wanted) in list(queue.items()):
                if key in keys and all(one in self._values for one in keys):
                    del queue[number]
                    reply(packed(number, 1, *([self._values[keys[0]]] if wanted else [])))

    def _forget(self, key: bytes) -> bool:
        value = self._values.pop(key, None)
        if value is not None:
            self._size -= len(key) + len(value)
        return value is not None


class StoreServer:
    """Serves a key-value store to admitted connections. It never waits: `pump()` when `fileno()` is readable, and at
    least once a second."""

    def __init__(self, gate: AdmissionListener, place: tuple[str, int, bytes]) -> None:
        self._gate, self._store = gate, KeyValueStore()
        self.place = place  # address, port and secret, for clients
        self._selector = selectors.EpollSelector()  # itself a descriptor that can be waited on
        self._selector.register(gate, selectors.EVENT_READ)
        self._clients: dict[int, tuple[Channel, Reply]] = {}

    def fileno(self) -> int:
        return self._selector.fileno()

    def pump(self) -> None:
        for connection in self._gate.pump():
            channel = Channel(connection, limits={REQUEST: LONGEST})

            def reply(message: bytes, to: Channel = channel) -> None:
                with contextlib.suppress(Closed, ProtocolError):  # the next receive finds that it is gone
                    to.send(ANSWER, message)

            self._selector.register(channel.fileno(), selectors.EVENT_READ)
            self._clients[channel.fileno()] = channel, reply
        for key, _ in self._selector.select(0):
            if key.fd in self._clients:
                self._serve(key.fd)
        for fd, (channel, _) in self._clients.items():  # a request may be answered by that of another client
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.pending else 0)
            if self._selector.get_key(fd).events != events:
                self._selector.modify(fd, events)

    def _serve(self, fd: int) -> None:
        channel, reply = self._clients[fd]
        try:
            for _, request in channel.receive():
                self._store.handle(request, reply)
            channel.flush()
        except (Closed, ProtocolError):
            del self._clients[fd]
            self._store.drop(reply)
            self._selector.unregister(fd)
            channel.close()

    def close(self) -> None:
        """Also for a forked child, which closes its copies of the parent's descriptors."""
        self._selector.close()
        for channel, _ in self._clients.values():
            channel.close()
        self._clients.clear()
        self._gate.close()
