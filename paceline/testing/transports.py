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
import socket
from array import array
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from paceline.network.calls.tcp_client import address_of
from paceline.ops import Call
from paceline.processes.calls.client import CallClient, Stopped
from paceline.processes.calls.mailbox import SAVE, Mailbox
from paceline.processes.memory.board import FAILED, STOP, STOPPING
from paceline.state import Vector
from paceline.testing._transport_nodes import LENGTH, PATIENCE, MakeTransport, Nodes, exit_code, fork

LIMIT = 120.0  # seconds that a check may take; past them it hangs

Check = Callable[[MakeTransport, int], None]
CHECKS: list[Check] = []


def _check(check: Callable[[Nodes], None]) -> Check:
    """A check, run in a process of its own."""

    @wraps(check)
    def run(transport: MakeTransport, servers: int = 1) -> None:
        def act() -> None:
            nodes = Nodes(transport, servers)
            check(nodes)
            nodes.end()

        read, write = os.pipe()
        with os.fdopen(read, "rb") as report:
            pid = fork(act, write)
            os.close(write)
            code = exit_code(pid, LIMIT)
            assert code == 0, f"{check.__name__} ({code}):\n{report.read().decode() if code == 1 else 'it hangs'}"

    CHECKS.append(run)
    return run


def _filled(value: float) -> Vector:
    return torch.full((LENGTH,), value)


def _same(found: Any, value: float) -> None:
    assert torch.equal(found, _filled(value)), f"a vector of {value} came as {found}"


def _call(client: CallClient, name: str, *args: Any) -> Any:
    return client.call(Call(client.memory.scheme.methods[name], args))


def _post(client: CallClient, name: str, *args: Any) -> Mailbox:
    return client.post(Call(client.memory.scheme.methods[name], args))


@_check
def values_cross_whole_and_by_value(nodes: Nodes) -> None:
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


@_check
def calls_of_a_worker_are_performed_in_order(nodes: Nodes) -> None:
    client = nodes.client(0)
    for count in range(1, 30):
        assert _call(client, "push", _filled(1.0)) is None  # sent and not waited for
        x, v = _call(client, "look")
        assert v == count
        _same(x, -float(count))


@_check
def all_servers_perform_all_calls_in_one_order(nodes: Nodes) -> None:
    def act(rank: int) -> None:
        client = nodes.client(rank)
        for number in range(60):
            _call(client, "mix", number + 100 * rank)
        client.special(SAVE)  # the silent calls before it have been performed

    other = fork(lambda: act(1))
    act(0)
    assert exit_code(other) == 0
    x, v = _call(nodes.client(0), "look")
    assert v == 120
    _same(x, float(x[0]))


@_check
def a_guard_waits(nodes: Nodes) -> None:
    client = nodes.client(0)
    waiting = _post(client, "reached", 2)
    _call(client, "both", _filled(1.0))
    assert not client.ready(waiting)
    _call(client, "both", _filled(1.0))
    assert client.collect(waiting) == 2


@_check
def versions_reach_the_worker(nodes: Nodes) -> None:
    client = nodes.client(0)
    for count in range(1, 4):
        _call(client, "both", _filled(1.0))
        assert client.memory.updates == count
    client.show()
    _same(client.memory.server_state().x, -3.0)


@_check
def counts_are_fetched_without_the_vectors(nodes: Nodes) -> None:
    client, other = nodes.client(0), nodes.client(1)
    for _ in range(3):
        _call(client, "both", _filled(1.0))
    client.show()
    _call(other, "both", _filled(1.0))
    client.show(counts=True)
    assert client.memory.server_state().v == 4
    assert client.memory.ledger("ledger.0.").cells.held.tolist() == [3, 4]  # the versions that workers have
    if nodes.apart:
        _same(client.memory.server_state().x, -3.0)
    client.show()
    _same(client.memory.server_state().x, -4.0)


@_check
def the_stop_comes_with_the_last_update(nodes: Nodes) -> None:
    nodes.put("goal", 2)
    nodes.replace(0)  # a server reads the goal at its start
    client = nodes.client(0)
    _call(client, "both", _filled(1.0))
    assert nodes.here.board.run[STOP] == 0
    _call(client, "both", _filled(1.0))
    assert nodes.here.board.run[STOP] == STOPPING
    _post(client, "both", _filled(1.0))  # not performed any more
    client.special(SAVE)
    _same(client.memory.server_state(prefix="keep.").x, -2.0)


@_check
def a_failure_reaches_the_worker(nodes: Nodes) -> None:
    client = nodes.client(0)
    nodes.put("stop", FAILED)
    client.special(SAVE)
    assert nodes.here.board.run[STOP] == FAILED


@_check
def a_worker_of_a_failed_run_waits_for_no_server(nodes: Nodes) -> None:
    client = nodes.client(0)
    nodes.kill(0)
    nodes.here.board.put("stop", FAILED)
    if nodes.apart:
        try:
            client.show()
        except Stopped:
            pass
        else:
            raise AssertionError("a worker of a failed run was not let go")
    nodes.client(1)
    nodes.put("stop", 0)
    nodes.replace(0, dead=True)


@_check
def a_server_that_died_between_calls_is_reached_again(nodes: Nodes) -> None:
    client = nodes.client(0)
    for count, shard in enumerate(nodes.servers):
        _same(_call(client, "both", _filled(1.0)), -float(2 * count + 1))
        nodes.replace(shard)
        _same(_call(client, "both", _filled(1.0)), -float(2 * count + 2))


@_check
def a_call_is_performed_once_if_its_server_died_before_it(nodes: Nodes) -> None:
    client = nodes.client(0)
    for count, shard in enumerate(nodes.servers, 1):
        nodes.freeze(shard)
        mailbox = _post(client, "both", _filled(1.0))
        nodes.replace(shard)
        _same(client.collect(mailbox), -float(count))


@_check
def a_call_is_performed_once_if_its_server_died_after_it(nodes: Nodes) -> None:
    """The reply was lost, not the call."""
    client = nodes.client(0)
    for count, shard in enumerate(nodes.servers, 1):
        _call(client, "both", _filled(0.0))  # a worker connects again to a server that was replaced while it waits
        mailbox = _post(client, "both", _filled(1.0))
        nodes.until_performed(shard, mailbox.index)
        nodes.replace(shard)
        _same(client.collect(mailbox), -float(count))


@_check
def a_restarted_worker_goes_on_after_its_last_call(nodes: Nodes) -> None:
    """Its calls have numbers of their own, though its memory may be new."""

    def die() -> None:
        client = nodes.client(0)
        _call(client, "both", _filled(1.0))
        _post(client, "both", _filled(1.0))

    assert exit_code(fork(die)) == 0
    x = _call(nodes.client(0), "both", _filled(1.0))
    assert float(x[0]) in (-2.0, -3.0)  # the call that was not waited for may have been lost


@_check
def a_stranger_does_not_disturb(nodes: Nodes) -> None:
    """A peer that cannot prove the secret is not heard, and blocks no worker."""
    client, board = nodes.client(0), nodes.here.board
    with contextlib.ExitStack() as strangers:
        for shard in nodes.servers if nodes.apart else ():
            address = address_of(board.server_high[shard], board.server_low[shard])
            for data in (b"", array("q", range(1000)).tobytes()):
                stranger = socket.create_connection((address, board.server_port[shard]), PATIENCE)
                strangers.enter_context(stranger).sendall(data)
        for count in range(1, 4):
            _same(_call(client, "both", _filled(1.0)), -float(count))
