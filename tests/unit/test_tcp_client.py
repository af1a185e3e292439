"""A worker's calls to servers of other nodes, against all that a server may send, and with a server."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable

import pytest
import torch
from memory_fixture import Company, Theatre, waiting
from remote_ends import LENGTH, bytes_of, opened, said, small, worker

from paceline.network.calls.tcp_client import address_of, words_of
from paceline.network.calls.tcp_connection import HELLO, ORDER, POST, REPLY, WELCOME
from paceline.ops import Call
from paceline.processes.calls.client import CallClient
from paceline.processes.calls.mailbox import got
from paceline.processes.memory.board import FAILED, MAILBOXES, STARTING, STOP, STOPPING
from paceline.processes.memory.call_codec import NONE, TENSOR
from paceline.processes.memory.packed_words import count_of
from paceline.processes.roles.server import Server as Serving


@pytest.mark.parametrize("address", ["127.0.0.1", "10.255.0.1", "::1", "fe80::1", "2001:db8::ffff:1"])
def test_addresses_are_two_words(address: str) -> None:
    high, low = words_of(address)
    assert all(-(1 << 63) <= word < 1 << 63 for word in (high, low))
    assert address_of(high, low) == address


# the reach


def test_an_answer_lies_where_the_worker_looks_for_it() -> None:
    with worker() as (theatre, memory, reach, far):
        board = theatre.board
        board.posted[1] = 4
        reply = memory.layout.places["lane.0.1.reply"].offset
        words = [1, TENSOR, 0, reply, 1, 2]
        data = torch.tensor([1.5, 2.5]).numpy().tobytes()
        answer = bytes_of(REPLY, 1, 4, 9, STOPPING, words=words, pieces=[(reply, 8)], data=data)
        assert said(answer, far, memory.wakeup.look)
        assert got(reach._mailboxes[1].reply) == words
        assert memory.segment.tensor(reply, torch.float32, (2,)).tolist() == [1.5, 2.5]
        assert (board.answered[0][1], memory.versions(), board.run[STOP]) == (4, [9], STOPPING)


def test_an_answer_to_a_call_that_was_given_up_is_not_heard() -> None:
    with worker() as (theatre, memory, _, far):
        theatre.board.posted[0] = 5
        assert said(bytes_of(REPLY, 0, 4, 9, FAILED, words=[1, NONE]), far, memory.wakeup.look)
        assert theatre.board.answered[0][0] == 0
        assert (memory.versions(), theatre.board.run[STOP]) == ([0], 0)


def test_versions_and_the_stop_only_rise_by_answers() -> None:
    with worker() as (theatre, memory, _, far):
        theatre.board.posted[0], theatre.board.run[STOP] = 5, STOPPING
        memory.set_version(0, 10)
        assert said(bytes_of(REPLY, 0, 5, 9, 0, words=[1, NONE]), far, memory.wakeup.look)
        assert (memory.versions(), theatre.board.run[STOP]) == ([10], STOPPING)


@pytest.mark.parametrize(
    "data",
    [
        bytes_of(POST, 0, 1, 0, words=[0]),
        bytes_of(ORDER, 0, 0, words=[0]),
        bytes_of(WELCOME, words=[0] * 2 * MAILBOXES),
        bytes_of(WELCOME, words=[0]),
        bytes_of(REPLY, MAILBOXES, 1, words=[1, NONE]),
        bytes_of(REPLY, 0, 5, words=[0]),
        bytes_of(REPLY, 0, 5, words=[2, NONE, NONE]),
        bytes_of(REPLY, 0, 5, words=[1, TENSOR, 0, 0, 1, 4]),
        bytes_of(REPLY, 0, 5, words=[1, TENSOR, 0, 0, 1, -1]),
        bytes_of(REPLY, 0, 5, words=[1] * 512),
        bytes_of(REPLY, 0, 5, pieces=[(0, 8)], data=bytes(8)),
    ],
)
def test_what_a_server_must_not_say_ends_the_connection(data: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with worker() as (theatre, memory, reach, far):
        theatre.board.posted[0] = 5
        before = bytes(memory.segment.memory)
        assert not said(data, far, memory.wakeup.look)
        assert bytes(memory.segment.memory) == before
        assert theatre.board.answered[0][0] == 0
        assert reach._wires == {0: None}
        assert "server:0 sent what it may not" in capsys.readouterr().out


# both


class _Node:
    """A server on a node of its own, in a process; the worker's node is the test's."""

    def __init__(self, here: Theatre, there: Theatre) -> None:
        self.here, self.there = here, there
        there.board.server_node[0] = 1
        self.company = Company(self._serve)
        self.links: list[CallClient] = []
        self._introduce()

    def _serve(self) -> None:
        Serving(opened(self.there, 1, self.there.board.server_place(0)), 0).run()

    def _introduce(self) -> None:
        """What hub and agents do: words of one board on the other."""
        there, here = self.there.board, self.here.board
        wakeup = opened(self.there, 1, there.launcher).wakeup
        wakeup.restless = lambda: True  # no process rings when the server's state changes
        assert wakeup.wait(lambda: bool(there.server_port[0] and there.server_state[0] != STARTING), 30)
        for name in ("server_high", "server_low", "server_port", "server_node", "server_state"):
            getattr(here, name)[0] = getattr(there, name)[0]

    def replace(self) -> None:
        self.company.kill()
        self.there.board.server_port[0], self.there.board.server_state[0] = 0, STARTING
        self.company = Company(self._serve)
        self._introduce()


def _link(node: _Node, rank: int) -> CallClient:
    memory = opened(node.here, 0, rank)
    node.links.append(CallClient(memory, rank, waiting(memory)))
    return node.links[-1]


def _across(play: Callable[[_Node], None]) -> None:
    with small(0, 1) as (here, _), small(1, 0) as (there, _):
        node = _Node(here, there)
        try:
            play(node)
            there.all_gone()
            assert node.company.end() == [0]
        finally:
            node.company.kill()
            for link in node.links:  # a process of its own would end here
                assert link._reach is not None
                link._reach._drop(0)


def test_calls_cross() -> None:
    def play(node: _Node) -> None:
        link = _link(node, 1)
        methods = node.here.scheme.methods
        x = torch.arange(float(LENGTH))
        for t in range(1, 4):
            found = link.call(Call(methods["both"], (torch.ones(LENGTH), t)))
            assert torch.equal(found, x - t)
        assert link.call(Call(methods["many"], (1, "two", (3, None)))) == 3
        assert torch.equal(link.call(Call(methods["look"], ())), x - 3)
        link.show()
        assert torch.equal(link.memory.server_state().x, x - 3)
        assert link.memory.updates == 3

    _across(play)


def test_a_server_that_died_between_calls_is_reached_again() -> None:
    def play(node: _Node) -> None:
        link = _link(node, 0)
        both = node.here.scheme.methods["both"]
        link.call(Call(both, (torch.ones(LENGTH), 0)))
        node.replace()
        found = link.call(Call(both, (torch.ones(LENGTH), 0)))
        assert torch.equal(found, torch.arange(float(LENGTH)) - 2)  # once each

    _across(play)


def test_a_call_posted_while_the_server_is_away_is_performed_once() -> None:
    def play(node: _Node) -> None:
        link = _link(node, 0)
        both = node.here.scheme.methods["both"]
        os.kill(node.company.pids[0], signal.SIGSTOP)
        mailbox = link.post(Call(both, (torch.ones(LENGTH), 0)))
        node.replace()  # it has died with the call on its way
        assert torch.equal(link.collect(mailbox), torch.arange(float(LENGTH)) - 1)
        assert node.there.board.posted[mailbox.index] == node.there.board.answered[0][mailbox.index]
        assert count_of(node.there.board.posted[mailbox.index]) == 1

    _across(play)


def test_a_stranger_does_not_disturb() -> None:
    def play(node: _Node) -> None:
        link = _link(node, 0)
        with socket.create_connection(("127.0.0.1", node.here.board.server_port[0]), 20) as stranger:
            stranger.sendall(bytes_of(HELLO, 0) * 20)
            look = node.here.scheme.methods["look"]
            assert torch.equal(link.call(Call(look, ())), torch.arange(float(LENGTH)))
            assert select.select([stranger], [], [], 20)[0]

    _across(play)
