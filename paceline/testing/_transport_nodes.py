"""The nodes of a run in which transports are checked: the worker's own, and one for each server, without a launcher."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.config.endpoint import Endpoint
from paceline.config.plan import Plan
from paceline.fields import Rate
from paceline.processes.calls.client import CallClient
from paceline.processes.calls.mailbox import Mailbox
from paceline.processes.memory.board import MAILBOXES, STARTING
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.parent_death import die_with_parent
from paceline.processes.roles.server import Server
from paceline.processes.supervisor.launch_memory import LaunchMemory
from paceline.processes.transport import Transport
from paceline.scheme import Scheme, on_server
from paceline.state import State, Vector

PATIENCE = 30.0  # seconds that one wait of a check may take
LENGTH = 70_001  # numbers of a vector: large enough to be received without a copy, and sharded unevenly
SECRET = bytes(range(32))
WORKERS = 2

MakeTransport = Callable[[], Transport]


@dataclass(frozen=True)
class Conformance(Scheme, name="conformance"):
    """A call of each form."""

    lr: Rate = 1.0

    @on_server
    def push(self, s: State, g: Vector) -> None:
        s.x -= self.lr * g
        s.v += 1

    @on_server
    def both(self, s: State, g: Vector) -> Vector:
        s.x -= self.lr * g
        s.v += 1
        x: Vector = s.x
        return x

    @on_server
    def mix(self, s: State, number: int) -> None:
        """The order of two of these can be seen in the result."""
        s.x.mul_(0.5).add_(number)
        s.v += 1

    @on_server
    def echo(self, s: State, g: Vector, flag: bool, note: str, pair: tuple[int, float]) -> Any:
        return g, (s.v, flag, note + "!", pair[1] / 2), None

    @on_server(reads=True)
    def look(self, s: State) -> tuple[Vector, int]:
        return s.x, s.v

    @on_server(when=lambda self, s, v: s.v >= v)
    def reached(self, s: State, v: int) -> int:
        reached: int = s.v
        return reached


class _Node:
    """The memory of one node, and a view of it for each process."""

    def __init__(self, number: int, servers: int, make: MakeTransport) -> None:
        self.number, self._make, scheme = number, make, Conformance()
        plan, endpoint = Plan(workers=WORKERS, servers=servers), Endpoint(number=number, secret=SECRET)
        self._context = LaunchMemory(plan, scheme, {"scheme": scheme}, endpoint).context
        self.board = self._context.board
        self._view(0).lay_out(torch.zeros(LENGTH), {}, {})
        self.board.put("ready", 1)

    def _view(self, place: int) -> RunMemory:
        memory = self._context.memory(place)
        memory.transport = self._make()
        return memory

    def memory(self, place: int) -> RunMemory:
        """A process's own view; `place` is the number of its pipe."""
        memory = self._view(place)
        memory.open()
        return memory

    def until(self, ready: Callable[[], bool], what: str) -> None:
        wakeup = self.memory(self.board.launcher).wakeup
        wakeup.restless = lambda: True  # no process rings
        assert wakeup.wait(ready, PATIENCE), f"not in time: {what}"

    def connects(self) -> bool:
        """Whether the transport takes calls of workers of other nodes."""
        memory = self.memory(self.board.server_place(0))
        mailboxes = [Mailbox(memory, rank, number) for rank in range(WORKERS) for number in range(MAILBOXES)]
        port = memory.transport.port(memory, 0, mailboxes)
        if port is not None:
            port.close()
        return port is not None


class Nodes:
    """The worker's node, and the servers at work on theirs."""

    def __init__(self, make: MakeTransport, servers: int) -> None:
        self.here = _Node(0, servers, make)
        self.apart = self.here.connects()
        self.nodes = [self.here, *(_Node(1 + s, servers, make) for s in range(servers if self.apart else 0))]
        self.servers = range(servers)
        for node in self.nodes:
            for shard in self.servers:
                node.board.server_node[shard] = self.of(shard).number
        self._pids = [self._start(shard) for shard in self.servers]
        for shard in self.servers:
            self._introduce(shard)

    def of(self, shard: int) -> _Node:
        """The node of a server."""
        return self.nodes[1 + shard] if self.apart else self.here

    def _start(self, shard: int) -> int:
        node = self.of(shard)
        return fork(lambda: Server(node.memory(node.board.server_place(shard)), shard).run())

    def _introduce(self, shard: int) -> None:
        """Copy a server's words from its own board to those of the other nodes, as coordinator and agents do."""
        if not self.apart:
            return
        home = self.of(shard)
        board = home.board
        home.until(
            lambda: bool(board.server_port[shard] and board.server_state[shard] != STARTING),
            f"server:{shard} listens",
        )
        for node in self.nodes:
            for name in ("server_high", "server_low", "server_port", "server_state"):
                getattr(node.board, name)[shard] = getattr(home.board, name)[shard]

    def freeze(self, shard: int) -> None:
        os.kill(self._pids[shard], signal.SIGSTOP)

    def kill(self, shard: int) -> None:
        os.kill(self._pids[shard], signal.SIGKILL)
        os.waitpid(self._pids[shard], 0)
        for node in self.nodes:
            node.board.server_port[shard], node.board.server_state[shard] = 0, STARTING

    def replace(self, shard: int, *, dead: bool = False) -> None:
        """Kill a server, unless it is dead, and start another one on its memory."""
        if not dead:
            self.kill(shard)
        self._pids[shard] = self._start(shard)
        self._introduce(shard)

    def until_performed(self, shard: int, mailbox: int) -> None:
        """Wait until a server has performed the call in a mailbox."""
        home = self.of(shard)
        number, answered = self.here.board.posted[mailbox], home.board.answered[shard]
        home.until(lambda: bool(answered[mailbox] == number), "the call is performed")

    def client(self, rank: int) -> CallClient:
        memory = self.here.memory(rank)

        def wait_for(ready: Callable[[], bool], what: str) -> None:
            assert memory.wakeup.wait(ready, PATIENCE), f"waited too long for {what}"

        return CallClient(memory, rank, wait_for)

    def put(self, word: str, value: int) -> None:
        """A word of the whole run, on the servers' boards."""
        for shard in self.servers:
            self.of(shard).board.put(word, value)

    def end(self) -> None:
        """All workers leave; the servers must end without an error."""
        for node in self.nodes:
            for rank in range(WORKERS):
                node.board.alive[rank] = 0
                node.board.gone[rank] = node.board.parted[rank] = 1
            node.memory(0).wakeup.ring_all()
        codes = [exit_code(pid) for pid in self._pids]
        assert codes == [0] * len(codes), f"exit codes of the servers: {codes}"


def fork(act: Callable[[], object], report: int = 2) -> int:
    """Run something in a process that dies with this one; its traceback goes to a descriptor."""
    sys.stdout.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(signal.SIGKILL, parent)
        torch.set_num_threads(1)
        act()
        code = 0
    except BaseException:
        with contextlib.suppress(OSError):
            os.write(report, traceback.format_exc().encode())
    finally:
        os._exit(code)


def exit_code(pid: int, limit: float = PATIENCE) -> int:
    handle = os.pidfd_open(pid)
    try:
        if not select.select([handle], [], [], limit)[0]:
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
