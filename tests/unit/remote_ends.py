"""Ends of connections between nodes: small stages, a server's door and a worker's reach over pairs of sockets."""

from __future__ import annotations

import fcntl
import gc
import os
import socket
import struct
import termios
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from memory_fixture import Theatre

from paceline.config.endpoint import Endpoint
from paceline.fields import Rate
from paceline.network.calls import tcp_client
from paceline.network.calls.tcp_client import TcpClient
from paceline.network.calls.tcp_connection import HEAD, WELCOME, Message, TcpConnection
from paceline.network.calls.tcp_server import TcpServer
from paceline.processes.calls.mailbox import Mailbox
from paceline.processes.memory import run_memory as stages
from paceline.processes.memory.board import MAILBOXES, TRAINING
from paceline.processes.memory.byte_ranges import WritableRanges
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.memory.segment import Segment, anonymous
from paceline.processes.memory.wakeup import Wakeup
from paceline.scheme import Scheme, State, Vector, on_server

SECRET = bytes(range(32))
LENGTH = 6


@dataclass(frozen=True)
class Exchange(Scheme, name="exchange"):
    """A call of each form."""

    lr: Rate = 1.0

    @on_server
    def both(self, s: State, g: Vector, t: int) -> Vector:
        s.x -= self.lr * g
        s.v += 1
        x: Vector = s.x
        return x

    @on_server
    def many(self, s: State, *values: Any) -> int:
        return len(values)

    @on_server(reads=True)
    def look(self, s: State) -> Vector:
        x: Vector = s.x
        return x


def bytes_of(
    kind: int,
    mailbox: int = 0,
    number: int = 0,
    value: int = 0,
    more: int = 0,
    *,
    words: Sequence[int] = (),
    pieces: Sequence[tuple[int, int]] = (),
    data: bytes = b"",
    zero: int = 0,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A message as it goes over the wire. `counts`: of words and pieces, if the head is to lie."""
    claimed = counts or (len(words), len(pieces))
    about = array("q", [*words, *(one for piece in pieces for one in piece)])
    return HEAD.pack(kind, zero, mailbox, number, value, more, *claimed) + about.tobytes() + data


def segment(size: int = 1 << 14) -> Segment:
    descriptor = anonymous("paceline-test", size)
    made = Segment(descriptor, size)
    os.close(descriptor)  # the mapping has one of its own
    return made


@contextmanager
def small(node: int, far: int, workers: int = 2, servers: int = 1) -> Iterator[tuple[Theatre, RunMemory]]:
    """A stage of few bytes on one node; on the other are the servers (if this is the workers') or the workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "MAILBOX_BYTES", 1 << 12)
        theatre = Theatre(Exchange(), torch.arange(float(LENGTH)), workers=workers, servers=servers)
    try:
        theatre.board.server_node[0] = 1
        yield theatre, opened(theatre, node, place=0 if far else theatre.board.server_place(0))
    finally:
        theatre.close()
        gc.collect()  # a mapping of shared memory holds a descriptor


def opened(theatre: Theatre, node: int, place: int) -> RunMemory:
    wakeup = Wakeup(theatre.board, theatre._wakeup, place)
    made = RunMemory(
        theatre.plan, theatre.scheme, theatre.board, wakeup, theatre._state, Endpoint(number=node, secret=SECRET)
    )
    made.open()
    return made


class Waiting:
    """Stands for a gate: a connection that is put in here has proved the secret."""

    exhausted = False

    def __init__(self) -> None:
        self.through: list[socket.socket] = []

    def fileno(self) -> int:
        return -1

    def pump(self) -> list[socket.socket]:
        found, self.through = self.through, []
        return found

    def close(self) -> None:
        assert not self.through


class Server:
    """A server's door, into which anything can be said."""

    def __init__(self, theatre: Theatre, memory: RunMemory) -> None:
        self.theatre, self.memory, self.board = theatre, memory, theatre.board
        self.mailboxes = [Mailbox(memory, rank, k) for rank in range(theatre.plan.workers) for k in range(MAILBOXES)]
        self.door = TcpServer(memory, 0, self.mailboxes)
        memory.wakeup.ignore(self.door._gate.fileno())
        self.door._gate.close()
        self.gate = Waiting()
        self._near: list[socket.socket] = []
        self.door._gate = self.gate  # type: ignore[assignment]

    def let_in(self) -> socket.socket:
        near, far = socket.socketpair()
        near.setblocking(False)
        self._near.append(near)
        self.gate.through.append(far)
        self.door._admit()
        return near

    def hear(self, data: bytes, connection: socket.socket) -> bool:
        """Say something; whether the connection is still open afterwards."""
        return said(data, connection, self.memory.wakeup.look)

    def close(self) -> None:
        for connection in self._near:
            connection.close()
        self.door.close()


@contextmanager
def server(servers: int = 1) -> Iterator[Server]:
    with small(1, 0, servers=servers) as (theatre, memory):
        made = Server(theatre, memory)
        try:
            yield made
        finally:
            made.close()


@contextmanager
def worker(rank: int = 0) -> Iterator[tuple[Theatre, RunMemory, TcpClient, socket.socket]]:
    """A worker's reach, and the server's end of its connection: the server has said WELCOME."""
    with small(0, 1) as (theatre, memory), pytest.MonkeyPatch.context() as patch:
        near, far = socket.socketpair()
        near.setblocking(False)
        near.sendall(bytes_of(WELCOME, words=[0] * (2 * MAILBOXES)))
        ends = [far]

        def enter(*_: Any, **__: Any) -> socket.socket:
            if not ends:
                raise ConnectionRefusedError
            return ends.pop()

        patch.setattr(tcp_client, "enter", enter)
        theatre.board.server_port[0], theatre.board.server_state[0] = 1, TRAINING
        mailboxes = [Mailbox(memory, rank, number) for number in range(MAILBOXES)]
        reach = TcpClient(memory, rank, mailboxes, lambda: False)
        assert near.recv(HEAD.size)  # its HELLO
        try:
            yield theatre, memory, reach, near
        finally:
            for wire in reach._wires.values():
                if wire is not None:
                    wire.close()
            near.close()


def said(data: bytes, connection: socket.socket, look: Callable[[], None]) -> bool:
    """Write it all, have the other side look at it; whether the connection is still open afterwards."""
    view = memoryview(data)
    while view:
        try:
            view = view[connection.send(view) :]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            return False
        look()
    for _ in range(10_000):  # one message at each look
        look()
        if not unread(connection):
            break
    return is_open(connection)


def unread(connection: socket.socket) -> int:
    """Bytes that the other side has not read yet."""
    waiting: int = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]
    return waiting


def is_open(connection: socket.socket) -> bool:
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return True
    except ConnectionResetError:
        pass
    return False


@dataclass
class Pair:
    """Two wires over a pair of sockets, each with a memory of its own."""

    spans: tuple[tuple[int, int], ...] = ((0, 1 << 14),)

    def __post_init__(self) -> None:
        near, far = socket.socketpair()
        self.segments = segment(), segment()
        self.raw = near
        self.near = TcpConnection(near, self.segments[0], WritableRanges(self.spans))
        self.far = TcpConnection(far, self.segments[1], WritableRanges(self.spans))
        self.found: list[Message] = []

    def pull(self) -> list[Message]:
        """What the far wire has whole by now."""
        before = -1
        while before != len(self.found):
            before = len(self.found)
            self.far.pull(self.found.append)
        return self.found

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.near.close()
        self.far.close()
