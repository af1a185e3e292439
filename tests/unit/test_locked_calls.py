"""Calls under the server's lock: who is woken, in which order calls are performed, and what a death leaves."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from memory_fixture import Company, Theatre

from paceline.errors import SchemeError
from paceline.processes.calls import locked_client
from paceline.processes.calls.client import RolledBack, Stopped
from paceline.processes.calls.locked_client import LockedClient
from paceline.processes.calls.mailbox import SET
from paceline.processes.memory import snapshot
from paceline.processes.memory.board import FAILED, MAILBOXES, STOP
from paceline.processes.roles.caretaker import Caretaker
from paceline.processes.roles.roles import Role
from paceline.processes.supervisor.recovery import Recovery
from paceline.processes.supervisor.waits import brief
from paceline.runs import order_log
from paceline.runs.run_directory import RunDirectory
from paceline.scheme import Scheme, State, Vector, on_server

LENGTH = 5


@dataclass(frozen=True)
class Gates(Scheme, name="gates"):
    """Guards of several kinds."""

    lr: float = 1.0

    def server(self, x0: Vector, workers: int) -> State:
        return State(x=x0, other=0, seats=0, taken=torch.full((8,), -1))

    @on_server
    def push(self, s: State, g: Vector) -> None:
        s.x -= self.lr * g
        s.v += 1

    @on_server
    def touch(self, s: State) -> None:
        s.other += 1

    @on_server
    def open(self, s: State, seats: int) -> None:
        s.seats += seats

    @on_server(when=lambda self, s, v: s.v == v)
    def exactly(self, s: State, v: int) -> int:
        return s.v

    @on_server(when=lambda self, s, rank: s.seats > 0)
    def enter(self, s: State, rank: int) -> int:
        s.seats -= 1
        s.taken[int((s.taken >= 0).sum())] = rank
        return s.seats

    @on_server(reads=True, when=lambda self, s, v: s.v >= v)
    def pull(self, s: State, v: int) -> Vector:
        return s.x

    @on_server(reads=True)
    def look(self, s: State) -> tuple[Vector, int]:
        return s.x, s.v

    @on_server
    def wrong(self, s: State) -> Any:
        s.x += 1
        return None

    @on_server
    def die(self, s: State) -> None:
        s.x[0] = 1e6
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def theatre(tmp_path: Path) -> Iterator[Theatre]:
    made = Theatre(Gates(), torch.zeros(LENGTH), workers=3, directory=tmp_path, locked=True)
    memory = made.memory(0)
    snapshot.keep_all(memory)
    snapshot.write(memory, "chief", {})
    yield made
    made.close()


def links(theatre: Theatre) -> tuple[list[LockedClient], list[int]]:
    """A client of each worker, and the ranks that they wake."""
    found: list[LockedClient] = []
    rung: list[int] = []
    for rank in range(theatre.plan.workers):
        link = theatre.link(rank)
        assert isinstance(link, LockedClient)
        link.memory.wakeup.ring = rung.append  # type: ignore[method-assign]
        found.append(link)
    return found, rung


def contended(client: LockedClient, whether: bool = True) -> None:
    """Have the lock seem to be taken, or free, whenever this client wants it."""
    acquire = type(client.server).acquire

    def acquired(*given: Any, **named: Any) -> None:
        acquire(client.server, *given, **named)
        client.server.contended = whether

    client.server.acquire = acquired  # type: ignore[method-assign]


def caretaker(theatre: Theatre) -> Caretaker:
    return Caretaker(theatre.memory(theatre.board.server_place(0)))


def test_only_whom_it_concerns_is_woken(theatre: Theatre) -> None:
    scheme, (clients, rung) = Gates(), links(theatre)
    waiting = clients[0].post(scheme.exactly(2))
    also = clients[1].post(scheme.exactly(7))
    mask = theatre.board.watched[waiting.index]
    assert mask
    clients[2].call(scheme.touch())  # a cell that no guard has read
    clients[2].call(scheme.push(torch.ones(LENGTH)))  # v is 1: both guards are still false
    assert (rung, theatre.board.watched[waiting.index]) == ([], mask)
    clients[2].call(scheme.push(torch.ones(LENGTH)))
    assert rung == [0]
    assert clients[0].collect(waiting) == 2
    assert not clients[1].ready(also)


def test_the_read_that_follows_a_push_is_made_with_it(theatre: Theatre, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, (clients, _) = Gates(), links(theatre)
    one, now, noted = torch.ones(LENGTH), [0], list[tuple[Any, ...]]()
    monkeypatch.setattr(locked_client, "time", SimpleNamespace(perf_counter_ns=lambda: now[0]))
    clients[0].journal = SimpleNamespace(add=lambda *record: noted.append(record), record=lambda *record: None)  # type: ignore[assignment]
    clients[0].call(scheme.push(one))
    assert clients[0].call(scheme.look())[1] == 1  # from now on a look is expected after a push
    contended(clients[0])
    clients[0].call(scheme.push(one))
    clients[1].call(scheme.push(one))
    x, v = clients[0].call(scheme.look())  # as it was right after its own push, which the log says
    assert (x.tolist(), v) == ([-2.0] * LENGTH, 2)
    assert noted[-1] == (order_log.RecordKind.READ, clients[0]._methods["look"], 2)
    assert clients[0].memory.tensor("ledger.0.held")[0] == 2
    clients[0].call(scheme.push(one))
    clients[1].call(scheme.push(one))
    now[0] += locked_client.RECENT  # too long ago
    assert clients[0].call(scheme.look())[1] == 5
    clients[0].call(scheme.push(one))
    clients[1].call(scheme.push(one))
    clients[0].call(scheme.touch())  # something else came next
    assert clients[0].call(scheme.look())[1] == 7
    clients[0].call(scheme.push(one))
    clients[1].call(scheme.push(one))
    assert clients[0].call(scheme.look())[1] == 9  # so it was not expected
    contended(clients[0], False)
    clients[0].call(scheme.push(one))
    clients[1].call(scheme.push(one))
    assert clients[0].call(scheme.look())[1] == 11  # nobody waits for the lock: the read may come later


def test_what_was_read_ahead_is_void_after_a_return_to_a_checkpoint(theatre: Theatre) -> None:
    scheme, (clients, _) = Gates(), links(theatre)
    contended(clients[0])
    for _ in range(2):
        clients[0].call(scheme.push(torch.ones(LENGTH)))
        clients[0].call(scheme.look())
    clients[0].call(scheme.push(torch.ones(LENGTH)))
    theatre.board.put("generation", 1)
    with pytest.raises(RolledBack):
        clients[0].call(scheme.look())


def test_a_guard_that_is_true_for_a_moment_is_taken(theatre: Theatre) -> None:
    scheme, (clients, _) = Gates(), links(theatre)
    waiting = clients[0].post(scheme.exactly(3))
    for _ in range(5):
        clients[1].call(scheme.push(torch.ones(LENGTH)))
    assert clients[0].collect(waiting) == 3


def test_waiting_calls_are_performed_in_the_order_of_their_arrival(theatre: Theatre) -> None:
    scheme, (clients, rung) = Gates(), links(theatre)
    order = [2, 0, 1, 0, 2]
    waiting = [(rank, clients[rank].post(scheme.enter(rank))) for rank in order]
    clients[1].call(scheme.open(2))
    assert sorted(rung) == [0, 2]
    assert [clients[rank].ready(mailbox) for rank, mailbox in waiting] == [True, True, False, False, False]
    clients[1].call(scheme.open(1))  # not taken away by who comes later
    clients[1].call(scheme.open(5))
    assert theatre.memory(0).tensor("server.0.taken")[:5].tolist() == order
    assert [clients[rank].collect(mailbox) for rank, mailbox in waiting] == [1, 0, 0, 4, 3]


@pytest.mark.parametrize("asleep", [True, False])
def test_all_that_wait_to_read_are_told_at_once_if_they_sleep(theatre: Theatre, asleep: bool) -> None:
    scheme, (clients, rung) = Gates(), links(theatre)
    told: list[int] = []

    def waits(rank: int) -> Any:
        def wait_for(ready: Any, what: str) -> None:
            told.append(rank)
            assert brief(clients[rank].memory, rank).startswith("pull: guard ")
            before_sleep = clients[rank].memory.wakeup.before_sleep
            assert before_sleep is not None
            if asleep:
                before_sleep()
            assert not ready()
            assert brief(clients[rank].memory, rank).startswith("pull: guard ")
            if rank == 0:
                clients[1].call(scheme.pull(1))  # waits too
            else:
                clients[2].call(scheme.push(torch.ones(LENGTH)))
            assert ready()

        return wait_for

    clients[0]._wait_for, clients[1]._wait_for = waits(0), waits(1)
    assert clients[0].call(scheme.pull(1)).tolist() == [-1.0] * LENGTH
    assert told == [0, 1]
    assert sorted(rung) == ([0, 1] if asleep else [])
    assert [len(client._free) for client in clients] == [MAILBOXES] * 3
    assert not any(theatre.board.watched)


def test_a_state_that_comes_before_a_reader_lies_down_is_not_missed(theatre: Theatre) -> None:
    scheme, (clients, rung) = Gates(), links(theatre)

    def wait_for(ready: Any, what: str) -> None:
        assert not ready()
        clients[1].call(scheme.push(torch.ones(LENGTH)))
        before_sleep = clients[0].memory.wakeup.before_sleep
        assert before_sleep is not None
        before_sleep()
        assert ready()

    clients[0]._wait_for = wait_for  # type: ignore[assignment]
    assert clients[0].call(scheme.pull(1)).tolist() == [-1.0] * LENGTH
    assert not rung
    assert not any(theatre.board.watched)


def test_a_spinning_reader_does_not_take_the_lock(theatre: Theatre) -> None:
    scheme, (clients, _) = Gates(), links(theatre)
    clients[0].server.acquire = None  # type: ignore[assignment, method-assign]

    def wait_for(ready: Any, what: str) -> None:
        for _ in range(2):
            assert not ready()
            clients[1].call(scheme.push(torch.ones(LENGTH)))
        assert ready()

    clients[0]._wait_for = wait_for  # type: ignore[assignment]
    assert clients[0].call(scheme.pull(2)).tolist() == [-2.0] * LENGTH


def test_hyper_parameters_change_for_all_at_one_place_in_the_order(theatre: Theatre) -> None:
    scheme, (clients, _) = Gates(), links(theatre)
    clients[1].call(scheme.push(torch.ones(LENGTH)))
    clients[0].special(SET, "lr", 0.5)
    clients[1].call(scheme.push(torch.ones(LENGTH)))  # its own scheme has not changed
    assert theatre.memory(0).tensor("server.x").tolist() == [-1.5] * LENGTH
    assert clients[1].memory.scheme.lr == 1.0  # type: ignore[attr-defined]


def test_a_worker_that_the_state_does_not_count_waits(theatre: Theatre) -> None:
    scheme, (clients, _) = Gates(), links(theatre)
    theatre.board.known[1] = 0  # it has joined, and the server has not seen it
    waited = []

    def joined(ready: Any, what: str) -> None:
        waited.append(what)
        caretaker(theatre)._count_members()
        assert ready()

    clients[1]._wait_for = joined  # type: ignore[assignment]
    clients[1].call(scheme.touch())
    assert waited == ["the server"]
    assert theatre.board.performed[0] == 2  # its coming, and the call


def test_calls_of_a_dead_worker_that_wait_are_void(theatre: Theatre) -> None:
    scheme, (clients, _) = Gates(), links(theatre)
    clients[0].post(scheme.enter(0))
    theatre.board.alive[0] = 0
    clients[1].call(scheme.open(1))  # before the server knows of the death
    assert theatre.memory(0).tensor("server.0.seats").item() == 1
    caretaker(theatre)._count_members()
    assert not any(theatre.board.watched)
    clients[1].call(scheme.touch())
    assert theatre.memory(0).tensor("server.0.seats").item() == 1


def recovery_of(theatre: Theatre) -> Recovery:
    memory = theatre.memory(theatre.board.launcher)
    launched: Any = SimpleNamespace(plan=theatre.plan, board=theatre.board, memory=memory, opened=lambda: True)
    return Recovery(launched, RunDirectory(Path(theatre.plan.directory)), lambda *_: None)


def test_who_dies_with_the_lock_and_outside_a_call_tears_nothing(theatre: Theatre) -> None:
    def die() -> None:
        link = theatre.link(1)
        assert isinstance(link, LockedClient)
        link.server.acquire(0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert Company(die).end() == [-signal.SIGKILL]
    assert not recovery_of(theatre).torn(Role("worker", 1))
    theatre.link(0).call(Gates().push(torch.ones(LENGTH)))
    assert theatre.memory(0).tensor("server.x").tolist() == [-1.0] * LENGTH


def test_after_a_death_inside_a_call_nobody_performs_anything_before_the_return(theatre: Theatre) -> None:
    scheme, board = Gates(), theatre.board
    assert Company(lambda: theatre.link(1).call(scheme.die())).end() == [-signal.SIGKILL]
    recovery = recovery_of(theatre)
    assert [recovery.torn(Role(*one)) for one in (("worker", 1), ("chief", 0), ("server", 0))] == [True, False, False]
    link = theatre.link(0)
    assert not link._look(scheme.methods["pull"], (0,))[0]
    link.memory.wakeup.wait = lambda ready, seconds=None: board.put("generation", 1)  # type: ignore
    with pytest.raises(RolledBack):
        link.call(scheme.push(torch.ones(LENGTH)))
    board.put("restore", 0)
    keeper = caretaker(theatre)
    keeper._begin()
    assert board.server_generation[0] == 1
    other = theatre.link(2)
    other.call(scheme.push(torch.ones(LENGTH)))
    assert theatre.memory(0).tensor("server.x").tolist() == [-1.0] * LENGTH


def test_nor_after_an_error_inside_a_call(theatre: Theatre) -> None:
    scheme, (clients, _) = Gates(), links(theatre)
    with pytest.raises(SchemeError, match="changed x and raised"):
        clients[0].call(scheme.wrong())
    theatre.board.run[STOP] = FAILED
    with pytest.raises(Stopped):
        clients[1].call(scheme.touch())
