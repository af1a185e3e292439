"""Checks that every transport must pass.

    from paceline.testing import transports

    @pytest.mark.parametrize("servers", [1, 2])
    @pytest.mark.parametrize("check", transports.CHECKS, ids=lambda check: check.__name__)
    def test_my_transport(check, servers):
        check(MyTransport, servers)

A check builds a run without a launcher: the worker's node, and for each server a node with a memory of its own (the
worker's node, if the transport has no port). Servers are real processes. Every check runs in a process of its own, so
that it leaves no connection behind.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import traceback
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from paceline.config.endpoint import Endpoint
from paceline.config.plan import Plan
from paceline.fields import Rate
from paceline.network.calls.tcp_client import address_of
from paceline.ops import Call
from paceline.processes.calls.client import CallClient, Stopped
from paceline.processes.calls.mailbox import SAVE, Mailbox
from paceline.processes.memory.board import FAILED, MAILBOXES, STOP, STOPPING, Board
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.memory.segment import anonymous
from paceline.processes.memory.wakeup import Wakeup
from paceline.processes.parent_death import die_with_parent
from paceline.processes.roles.server import Server
from paceline.processes.transport import Transport
from paceline.scheme import Scheme, on_server
from paceline.state import State, Vector

LIMIT = 120.0  # seconds that a check may take; past them it hangs
PATIENCE = 30.0  # seconds that one wait of a check may take
LENGTH = 70_001  # numbers of a vector: large enough to be received without a copy, and sharded unevenly
SECRET = bytes(range(32))
WORKERS = 2

MakeTransport = Callable[[], Transport]
Check = Callable[[MakeTransport, int], None]


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
        self.number, self._make = number, make
        self._plan = Plan(workers=WORKERS, servers=servers)
        self.board = Board.create(WORKERS, servers)
        self._pipes = Wakeup.create(self.board.roles)
        self._state = anonymous("paceline-conformance")
        for rank in range(WORKERS):
            self.board.alive[rank] = self.board.known[rank] = 1
        self.board.put("goal", -1)
        self.board.put("checkpoint", -1)
        self._view(0).lay_out(torch.zeros(LENGTH), {}, {})
        self.board.put("ready", 1)

    def _view(self, place: int) -> RunMemory:
        wakeup = Wakeup(self.board, self._pipes, place)
        endpoint = Endpoint(number=self.number, secret=SECRET)
        memory = RunMemory(self._plan, Conformance(), self.board, wakeup, self._state, endpoint)
        memory.transport = self._make()
        return memory

    def memory(self, place: int) -> RunMemory:
        """A process's own view; `place` is the number of its pipe."""
        memory = self._view(place)
        memory.open()
        return memory

    def until(self, ready: Callable[[], bool], what: str) -> None:
        wakeup = self.memory(self.board.launcher).wakeup
        wakeup.restless = lambda: True  # nobody rings
        assert wakeup.wait(ready, PATIENCE), f"not in time: {what}"

    def connects(self) -> bool:
        """Whether the transport takes calls of workers of other nodes."""
        memory = self.memory(self.board.server_place(0))
        port = memory.transport.port(memory, 0, _all_mailboxes(memory))
        if port is not None:
            port.close()
        return port is not None


class _Nodes:
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
        return _fork(lambda: Server(node.memory(node.board.server_place(shard)), shard).run())

    def _introduce(self, shard: int) -> None:
        """Copy a server's words from its own board to those of the other nodes, as coordinator and agents do."""
        if not self.apart:
            return
        home = self.of(shard)
        home.until(lambda: bool(home.board.server_port[shard]), f"server:{shard} listens")
        for node in self.nodes:
            for name in ("server_high", "server_low", "server_port"):
                getattr(node.board, name)[shard] = getattr(home.board, name)[shard]

    def freeze(self, shard: int) -> None:
        os.kill(self._pids[shard], signal.SIGSTOP)

    def kill(self, shard: int) -> None:
        os.kill(self._pids[shard], signal.SIGKILL)
        os.waitpid(self._pids[shard], 0)
        for node in self.nodes:
            node.board.server_port[shard] = 0

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
        codes = [_exit_code(pid) for pid in self._pids]
        assert codes == [0] * len(codes), f"exit codes of the servers: {codes}"


def _all_mailboxes(memory: RunMemory) -> list[Mailbox]:
    return [Mailbox(memory, rank, number) for rank in range(WORKERS) for number in range(MAILBOXES)]


def _fork(act: Callable[[], object], report: int = 2) -> int:
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


def _exit_code(pid: int, limit: float = PATIENCE) -> int:
    handle = os.pidfd_open(pid)
    try:
        if not select.select([handle], [], [], limit)[0]:
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _isolated(check: Callable[[_Nodes], None]) -> Check:
    """A check in a process of its own."""

    @wraps(check)
    def run(transport: MakeTransport, servers: int = 1) -> None:
        def act() -> None:
            nodes = _Nodes(transport, servers)
            check(nodes)
            nodes.end()

        read, write = os.pipe()
        with os.fdopen(read, "rb") as report:
            pid = _fork(act, write)
            os.close(write)
            code = _exit_code(pid, LIMIT)
            assert code == 0, f"{check.__name__} ({code}):\n{report.read().decode() if code == 1 else 'it hangs'}"

    return run


def _filled(value: float) -> Vector:
    return torch.full((LENGTH,), value)


def _same(found: Any, value: float) -> None:
    assert torch.equal(found, _filled(value)), f"a vector of {value} came as {found}"


def _call(client: CallClient, name: str, *args: Any) -> Any:
    return client.call(Call(client.memory.scheme.methods[name], args))


def _post(client: CallClient, name: str, *args: Any) -> Mailbox:
    return client.post(Call(client.memory.scheme.methods[name], args))


@_isolated
def values_cross_whole_and_by_value(nodes: _Nodes) -> None:
    """Arguments are those of the moment of the call, and results are the worker's own."""
    client, g = nodes.client(1), _filled(0.5)
    for _ in range(3):
        echoed, plain, nothing = _call(client, "echo", g, True, "héllo", (1, 3.0))
        assert (plain, nothing) == ((0, True, "héllo!", 1.5), None)
        _same(echoed, 0.5)
        echoed.fill_(9.0)
    kept = [_call(client, "both", _filled(1.0)) for _ in range(4)]
    for count, x in enumerate(kept, 1):  # a result stays when the next one arrives
        _same(x, -float(count))
    g.fill_(1.0)
    for _ in range(10):
        _call(client, "push", g)
        g += 1  # after the call was sent
    _same(_call(client, "look")[0], -4.0 - 55.0)


@_isolated
def calls_of_a_worker_are_performed_in_order(nodes: _Nodes) -> None:
    client = nodes.client(0)
    for count in range(1, 30):
        assert _call(client, "push", _filled(1.0)) is None  # sent and not waited for
        x, v = _call(client, "look")
        assert v == count
        _same(x, -float(count))


@_isolated
def all_servers_perform_all_calls_in_one_order(nodes: _Nodes) -> None:
    def act(rank: int) -> None:
        client = nodes.client(rank)
        for number in range(60):
            _call(client, "mix", number + 100 * rank)
        client.special(SAVE)  # the silent calls before it have been performed

    other = _fork(lambda: act(1))
    act(0)
    assert _exit_code(other) == 0
    x, v = _call(nodes.client(0), "look")
    assert v == 120
    _same(x, float(x[0]))


@_isolated
def a_guard_waits(nodes: _Nodes) -> None:
    client = nodes.client(0)
    waiting = _post(client, "reached", 2)
    _call(client, "both", _filled(1.0))
    assert not client.ready(waiting)
    _call(client, "both", _filled(1.0))
    assert client.collect(waiting) == 2


@_isolated
def versions_reach_the_worker(nodes: _Nodes) -> None:
    client = nodes.client(0)
    for count in range(1, 4):
        _call(client, "both", _filled(1.0))
        assert client.memory.updates == count
    client.show()
    _same(client.memory.server_state().x, -3.0)


@_isolated
def the_stop_comes_with_the_last_update(nodes: _Nodes) -> None:
    nodes.put("goal", 2)
    nodes.replace(0)  # a server reads the goal at its start
    client = nodes.client(0)
    _call(client, "both", _filled(1.0))
    assert nodes.here.board.run[STOP] == 0
    _call(client, "both", _filled(1.0))
    assert nodes.here.board.run[STOP] == STOPPING
    client.post(Call(client.memory.scheme.methods["both"], (_filled(1.0),)))  # not performed any more
    client.special(SAVE)
    _same(client.memory.server_state(prefix="keep.").x, -2.0)


@_isolated
def a_failure_reaches_the_worker(nodes: _Nodes) -> None:
    client = nodes.client(0)
    nodes.put("stop", FAILED)
    client.special(SAVE)
    assert nodes.here.board.run[STOP] == FAILED


@_isolated
def a_worker_of_a_failed_run_waits_for_no_server(nodes: _Nodes) -> None:
    client = nodes.client(0)
    nodes.kill(0)
    nodes.here.board.put("stop", FAILED)
    if nodes.apart:
        with _raises(Stopped):
            client.show()
    nodes.client(1)
    nodes.put("stop", 0)
    nodes.replace(0, dead=True)


@_isolated
def a_server_that_died_between_calls_is_reached_again(nodes: _Nodes) -> None:
    client = nodes.client(0)
    for count, shard in enumerate(nodes.servers):
        _same(_call(client, "both", _filled(1.0)), -float(2 * count + 1))
        nodes.replace(shard)
        _same(_call(client, "both", _filled(1.0)), -float(2 * count + 2))


@_isolated
def a_call_is_performed_once_if_its_server_died_before_it(nodes: _Nodes) -> None:
    client = nodes.client(0)
    for count, shard in enumerate(nodes.servers, 1):
        nodes.freeze(shard)
        mailbox = _post(client, "both", _filled(1.0))
        nodes.replace(shard)
        _same(client.collect(mailbox), -float(count))


@_isolated
def a_call_is_performed_once_if_its_server_died_after_it(nodes: _Nodes) -> None:
    """The reply was lost, not the call."""
    client = nodes.client(0)
    for count, shard in enumerate(nodes.servers, 1):
        mailbox = _post(client, "both", _filled(1.0))
        nodes.until_performed(shard, mailbox.index)
        nodes.replace(shard)
        _same(client.collect(mailbox), -float(count))


@_isolated
def a_restarted_worker_goes_on_after_its_last_call(nodes: _Nodes) -> None:
    """Its calls have numbers of their own, though its memory may be new."""

    def die() -> None:
        client = nodes.client(0)
        _call(client, "both", _filled(1.0))
        client.post(Call(client.memory.scheme.methods["both"], (_filled(1.0),)))

    assert _exit_code(_fork(die)) == 0
    x = _call(nodes.client(0), "both", _filled(1.0))
    assert float(x[0]) in (-2.0, -3.0)  # the call that was not waited for may have been lost


@_isolated
def a_stranger_does_not_disturb(nodes: _Nodes) -> None:
    """Who cannot prove the secret is not heard, and blocks nobody."""
    client, board = nodes.client(0), nodes.here.board
    with contextlib.ExitStack() as strangers:
        for shard in nodes.servers if nodes.apart else ():
            address = address_of(board.server_high[shard], board.server_low[shard])
            for data in (b"", array("q", range(1000)).tobytes()):
                stranger = socket.create_connection((address, board.server_port[shard]), PATIENCE)
                strangers.enter_context(stranger).sendall(data)
        for count in range(1, 4):
            _same(_call(client, "both", _filled(1.0)), -float(count))


@contextlib.contextmanager
def _raises(kind: type[BaseException]) -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


CHECKS: tuple[Check, ...] = (
    values_cross_whole_and_by_value,
    calls_of_a_worker_are_performed_in_order,
    all_servers_perform_all_calls_in_one_order,
    a_guard_waits,
    versions_reach_the_worker,
    the_stop_comes_with_the_last_update,
    a_failure_reaches_the_worker,
    a_worker_of_a_failed_run_waits_for_no_server,
    a_server_that_died_between_calls_is_reached_again,
    a_call_is_performed_once_if_its_server_died_before_it,
    a_call_is_performed_once_if_its_server_died_after_it,
    a_restarted_worker_goes_on_after_its_last_call,
    a_stranger_does_not_disturb,
)
