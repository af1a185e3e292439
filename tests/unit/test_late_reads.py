"""A worker that had to wait for the lock copies x after it has released it: who waits for the copy."""

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
from memory_fixture import Company, Theatre, played

from paceline.processes.calls import late_reads
from paceline.processes.calls.client import RolledBack
from paceline.processes.calls.locked_client import LockedClient
from paceline.processes.calls.mailbox import SAVE
from paceline.processes.memory import snapshot
from paceline.processes.roles.roles import Role
from paceline.processes.supervisor.recovery import Recovery
from paceline.rules import SGD
from paceline.runs.run_directory import RunDirectory
from paceline.scheme import Scheme, State, Vector, on_server

LENGTH = 5


@dataclass(frozen=True)
class Pushes(Scheme, name="pushes"):
    """Several ways to use x."""

    def server(self, x0: Vector, workers: int) -> State:
        return State(x=x0, count=0)

    @on_server
    def push(self, s: State, g: Vector) -> None:
        s.x -= g
        s.v += 1

    @on_server
    def push_by_rule(self, s: State, g: Vector) -> None:
        SGD().apply(s, g, 1.0)
        s.v += 1

    @on_server
    def assign(self, s: State, x: Vector) -> None:
        s.x = x
        s.v += 1

    @on_server
    def write(self, s: State, value: float) -> None:
        for _ in range(2):
            s.write("x", 0, value)
        assert s.entry("x", 0) == value
        s.v += 1

    @on_server
    def touch(self, s: State) -> None:
        s.count += 1

    @on_server(reads=True)
    def look(self, s: State) -> tuple[Vector, int]:
        return s.x, s.v


@pytest.fixture
def theatre(tmp_path: Path) -> Iterator[Theatre]:
    made = Theatre(Pushes(), torch.zeros(LENGTH), workers=3, directory=tmp_path, locked=True)
    memory = made.memory(0)
    snapshot.keep_all(memory)
    snapshot.write(memory, "chief", {})
    yield made
    made.close()


def link_of(theatre: Theatre, rank: int, *, contended: bool = False) -> LockedClient:
    """A client. `contended`: the lock seems to be taken whenever it wants it, and it expects to look after a push."""
    link = theatre.link(rank)
    assert isinstance(link, LockedClient)
    if contended:
        acquire = link.server.acquire

        def acquired(*given: Any, **named: Any) -> None:
            acquire(*given, **named)
            link.server.contended = True

        link.server.acquire = acquired  # type: ignore[method-assign]
        link.call(Pushes().push(torch.zeros(LENGTH)))
        link.call(Pushes().look())
    return link


def paused(link: LockedClient) -> Any:
    """Have a client release the lock without copying; what makes the copy."""
    perform = link.server.reads.perform
    link.server.reads.perform = lambda: None  # type: ignore[method-assign]
    return perform


def test_x_is_copied_after_the_lock(theatre: Theatre) -> None:
    scheme, link, other = Pushes(), link_of(theatre, 0, contended=True), link_of(theatre, 1)
    copy = paused(link)
    link.call(scheme.push(torch.ones(LENGTH)))
    assert theatre.board.reading.tolist() == [1, 0, 0]
    other.call(scheme.touch())  # it does not use x
    assert other.call(scheme.look())[0].tolist() == [-1.0] * LENGTH  # nor does it change x
    copy()
    assert theatre.board.reading.tolist() == [0, 0, 0]
    assert link._ahead is not None
    x, v = link._ahead.result
    assert (x.tolist(), v) == ([-1.0] * LENGTH, 2)


@pytest.mark.parametrize("method", ["push", "push_by_rule", "assign", "write", "return"])
def test_who_changes_x_waits_for_the_copy(theatre: Theatre, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, link, other = Pushes(), link_of(theatre, 0, contended=True), link_of(theatre, 1)
    copy, waited = paused(link), []
    link.call(scheme.push(torch.ones(LENGTH)))

    def yielded() -> None:
        waited.append(method)
        copy()

    monkeypatch.setattr(late_reads, "os", SimpleNamespace(sched_yield=yielded))
    if method == "return":
        other.server.return_to(snapshot.find(other.memory, 0), 0)
    else:
        other.call(getattr(scheme, method)(7.0 if method == "write" else torch.ones(LENGTH)))
    assert waited == [method]
    assert link._ahead is not None
    assert link._ahead.result[0].tolist() == [-1.0] * LENGTH


def test_a_checkpoint_does_not_wait(theatre: Theatre) -> None:
    link, other = link_of(theatre, 0, contended=True), link_of(theatre, 1)
    paused(link)
    link.call(Pushes().push(torch.ones(LENGTH)))
    other.special(SAVE)
    assert other.memory.tensor("keep.server.x").tolist() == [-1.0] * LENGTH


def test_many_processes_read_what_they_have_pushed(theatre: Theatre) -> None:
    scheme, rounds = Pushes(), 200

    def part(rank: int) -> Any:
        def play() -> None:
            link = link_of(theatre, rank, contended=True)
            link._recycled.room_for = torch.empty_like  # type: ignore[method-assign, assignment]
            for _ in range(rounds):
                link.call(scheme.push_by_rule(torch.full((LENGTH,), -1.0)))
                x, _ = link.call(scheme.look())
                assert x.eq(x[0]).all()  # of one moment

        return play

    played(*(part(rank) for rank in range(3)))
    assert theatre.memory(0).tensor("server.x").tolist() == [3.0 * rounds] * LENGTH
    assert not any(theatre.board.reading)


def test_the_death_of_who_copies_tears_nothing(theatre: Theatre, monkeypatch: pytest.MonkeyPatch) -> None:
    def die() -> None:
        link = link_of(theatre, 1, contended=True)
        link.server.reads.perform = lambda: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        link.call(Pushes().push(torch.ones(LENGTH)))

    assert Company(die).end() == [-signal.SIGKILL]
    assert theatre.board.reading.tolist() == [0, 1, 0]
    memory = theatre.memory(theatre.board.launcher)
    launched: Any = SimpleNamespace(plan=theatre.plan, board=theatre.board, memory=memory, opened=lambda: True)
    recovery = Recovery(launched, RunDirectory(Path(theatre.plan.directory)), lambda *_: None)
    assert not recovery.torn(Role("worker", 1))

    def yielded() -> None:  # the supervisor hears of the death while another worker waits
        recovery.take_back_words(Role("worker", 1), awaited=False)

    monkeypatch.setattr(late_reads, "os", SimpleNamespace(sched_yield=yielded))
    link_of(theatre, 0).call(Pushes().push(torch.ones(LENGTH)))
    assert theatre.memory(0).tensor("server.x").tolist() == [-2.0] * LENGTH


def test_a_wait_for_a_copy_ends_with_a_return_to_a_checkpoint(theatre: Theatre) -> None:
    theatre.board.reading[1] = 1
    link = link_of(theatre, 0)
    check = link.server.reads._check
    looks: list[int] = []

    def checked(generation: int) -> None:
        looks.append(generation)
        theatre.board.put("generation", 1)
        check(generation)

    link.server.reads._check = checked
    with pytest.raises(RolledBack):
        link.call(Pushes().push(torch.ones(LENGTH)))
    assert looks == [0]
