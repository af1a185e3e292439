"""Rows that a call writes are copied when the lock is released: who waits for them, and what a death leaves."""

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

from paceline.errors import SchemeError
from paceline.processes.calls.client import RolledBack
from paceline.processes.calls.late_copies import SMALL, LateCopies
from paceline.processes.calls.locked_client import LockedClient
from paceline.processes.calls.mailbox import SAVE
from paceline.processes.memory import snapshot
from paceline.processes.roles.caretaker import Caretaker
from paceline.processes.roles.roles import Role
from paceline.processes.supervisor.recovery import Recovery
from paceline.runs.run_directory import RunDirectory
from paceline.runtime.call_scheduler import CallScheduler
from paceline.scheme import Scheme, State, Vector, on_server

LENGTH = SMALL // 4


@dataclass(frozen=True)
class Rows(Scheme, name="rows"):
    """Keeps a vector of each worker."""

    def server(self, x0: Vector, workers: int) -> State:
        return State(x=x0, rows=torch.zeros(workers, len(x0)), marks=torch.zeros(workers, dtype=torch.int64))

    @on_server
    def keep(self, s: State, g: Vector, rank: int) -> None:
        s.write("rows", rank, g)
        s.write("marks", rank, s.entry("marks", rank) + 1)

    @on_server
    def keep_and_tell(self, s: State, g: Vector, rank: int) -> float:
        s.write("rows", rank, g)
        return float(s.rows[rank, 0])

    @on_server
    def held_before(self, s: State, g: Vector, rank: int) -> float:
        rows = s.rows
        s.write("rows", rank, g)
        return float(rows[rank, 0])

    @on_server
    def keep_twice(self, s: State, g: Vector, rank: int) -> None:
        double = 2 * g
        s.write("rows", rank, double)
        double += 1

    @on_server
    def short(self, s: State, g: Vector, rank: int) -> None:
        s.write("rows", rank, g[1:])

    @on_server
    def clear(self, s: State) -> None:
        s.rows = 0

    @on_server
    def total(self, s: State) -> float:
        return float(s.rows[:, 0].sum())

    @on_server(reads=True)
    def look(self, s: State, rank: int) -> Vector:
        return s.rows[rank]

    @on_server(when=lambda self, s, least: bool(s.rows.sum() >= least))
    def full(self, s: State, least: float) -> float:
        return float(s.rows.sum())


@pytest.fixture
def theatre(tmp_path: Path) -> Iterator[Theatre]:
    made = Theatre(Rows(), torch.zeros(LENGTH), workers=3, directory=tmp_path, locked=True)
    memory = made.memory(0)
    snapshot.keep_all(memory)
    snapshot.write(memory, "chief", {})
    yield made
    made.close()


def link_of(theatre: Theatre, rank: int) -> LockedClient:
    link = theatre.link(rank)
    assert isinstance(link, LockedClient)
    return link


def ones() -> Vector:
    return torch.ones(LENGTH)


def paused(link: LockedClient) -> list[Any]:
    """Let a client release the lock without copying; gives the copies that it has still to make."""
    held: list[Any] = []
    perform = link.server.copies.perform

    def later() -> None:
        if link.server.copies._rows:
            held.append(perform)

    link.server.copies.perform = later  # type: ignore[method-assign]
    return held


def test_a_row_is_copied_when_the_lock_is_free_again(theatre: Theatre) -> None:
    scheme, link, other = Rows(), link_of(theatre, 0), link_of(theatre, 1)
    held = paused(link)
    link.call(scheme.keep(ones(), 0))
    assert theatre.board.copying.tolist() == [1, 0, 0]
    assert not link.memory.tensor("server.rows").any()
    assert theatre.board.mark[0] % 2 == 0
    other.call(scheme.keep(2 * ones(), 1))  # another row: it need not wait
    held[0]()
    assert theatre.board.copying.tolist() == [0, 0, 0]
    assert link.memory.tensor("server.rows")[:, 0].tolist() == [1.0, 2.0, 0.0]
    assert link.memory.tensor("server.0.marks").tolist() == [1, 1, 0]


@pytest.mark.parametrize("use", ["total", "clear", "look", "save", "full"])
def test_who_uses_the_cell_waits_for_the_copies(theatre: Theatre, use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, link, other = Rows(), link_of(theatre, 0), link_of(theatre, 1)
    held, waited = paused(link), []
    link.call(scheme.keep(ones(), 0))

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        held[0]()

    monkeypatch.setattr("paceline.processes.calls.late_copies.time", SimpleNamespace(sleep=sleep))
    if use == "save":
        other.special(SAVE)
        assert other.memory.tensor("keep.server.rows")[0, 0] == 1
    elif use == "clear":
        other.call(scheme.clear())
        assert not other.memory.tensor("server.rows").any()
    elif use == "look":
        assert other.call(scheme.look(0))[0] == 1
    elif use == "full":
        assert other.call(scheme.full(float(LENGTH))) == LENGTH
    else:
        assert other.call(scheme.total()) == 1
    assert waited == [0]


def test_the_model_that_is_evaluated_has_no_row_that_is_still_copied(theatre: Theatre) -> None:
    memory, looked = theatre.memory(0), []
    theatre.board.copying[1] = 1
    model = Rows.model

    def looking(self: Rows, s: State) -> Vector:
        looked.append(theatre.board.copying[1])
        theatre.board.copying[1] = 0
        return model(self, s)

    object.__setattr__(memory.scheme, "model", looking.__get__(memory.scheme))
    snapshot.steady(memory)
    assert looked == [1, 0]


def test_a_method_reads_what_it_has_written(theatre: Theatre) -> None:
    scheme, link = Rows(), link_of(theatre, 0)
    assert link.call(scheme.keep_and_tell(ones(), 0)) == 1.0
    assert link.call(scheme.held_before(3 * ones(), 0)) == 3.0  # by a tensor that it had before it wrote
    link.call(scheme.keep_twice(ones(), 0))  # no argument: it could change after it was written
    assert link.memory.tensor("server.rows")[0, 0] == 2.0


def test_a_guard_that_reads_rows_is_evaluated_on_them(theatre: Theatre) -> None:
    scheme, link, other = Rows(), link_of(theatre, 0), link_of(theatre, 1)
    waiting = other.post(scheme.full(2.0 * LENGTH))
    link.call(scheme.keep(ones(), 0))
    assert not other.ready(waiting)
    link.call(scheme.keep(ones(), 2))
    assert other.collect(waiting) == 2 * LENGTH


def test_the_simulator_does_the_same(theatre: Theatre) -> None:
    scheme = Rows()
    scheduler = CallScheduler(scheme, scheme.server(torch.zeros(LENGTH), 3), 3)
    replies = [scheduler.submit(0, call)[0].result for call in (scheme.keep(ones(), 1), scheme.total())]
    assert replies == [None, 1.0]
    with pytest.raises(SchemeError, match="a row of 'rows' has shape"):
        scheduler.submit(0, scheme.short(ones(), 1))
    with pytest.raises(SchemeError, match="no cell 'row'"):
        scheduler.state.write("row", 0, 1)


def test_rows_of_many_processes_at_once(theatre: Theatre) -> None:
    scheme, rounds = Rows(), 50

    def part(rank: int) -> Any:
        def play() -> None:
            link = link_of(theatre, rank)
            for number in range(rounds):
                link.call(scheme.keep(torch.full((LENGTH,), float(number)), rank))
                link.call(scheme.total())
                assert link.call(scheme.look(rank)).eq(number).all()

        return play

    played(*(part(rank) for rank in range(3)))
    memory = theatre.memory(0)
    assert memory.tensor("server.rows").eq(rounds - 1).all()
    assert memory.tensor("server.0.marks").tolist() == [rounds] * 3
    assert not any(theatre.board.copying)


def recovery_of(theatre: Theatre) -> Recovery:
    memory = theatre.memory(theatre.board.launcher)
    launched: Any = SimpleNamespace(
        plan=theatre.plan, board=theatre.board, memory=memory, wakeup=memory.wakeup, opened=lambda: True
    )
    launched.updates = lambda: memory.updates
    return Recovery(launched, RunDirectory(Path(theatre.plan.directory)), lambda *_: None)


def test_a_death_before_the_copy_is_a_death_inside_the_call(theatre: Theatre, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, board = Rows(), theatre.board

    def die() -> None:
        link = link_of(theatre, 1)
        link.call(scheme.keep(ones(), 1))
        link.server.copies.perform = lambda: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        link.call(scheme.keep(2 * ones(), 1))

    assert Company(die).end() == [-signal.SIGKILL]
    assert (board.mark[0] % 2, board.copying.tolist()) == (0, [0, 1, 0])
    recovery = recovery_of(theatre)
    assert [recovery.torn(Role(*one)) for one in (("worker", 1), ("worker", 2), ("chief", 0))] == [True, False, False]
    other = link_of(theatre, 2)
    other.call(scheme.keep(ones(), 2))  # its own row

    def sleep(seconds: float) -> None:
        recovery.go_back(Role("worker", 1), "", [])

    monkeypatch.setattr("paceline.processes.calls.late_copies.time", SimpleNamespace(sleep=sleep))
    with pytest.raises(RolledBack):  # who needs the row returns to the checkpoint with all others
        other.call(scheme.total())
    keeper = Caretaker(theatre.memory(board.server_place(0)))
    keeper._begin()
    assert (board.server_generation[0], board.mark[0] % 2, any(board.copying)) == (1, 0, False)
    assert not theatre.memory(0).tensor("server.rows").any()
    assert link_of(theatre, 0).call(scheme.total()) == 0.0


def test_a_return_to_a_checkpoint_waits_for_those_that_still_copy(
    theatre: Theatre, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme, board, link = Rows(), theatre.board, link_of(theatre, 0)
    held = paused(link)
    link.call(scheme.keep(ones(), 0))
    recovery_of(theatre).go_back(Role("worker", 1), "", [])
    monkeypatch.setattr("paceline.processes.calls.late_copies.time", SimpleNamespace(sleep=lambda seconds: held[0]()))
    Caretaker(theatre.memory(board.server_place(0)))._begin()
    assert not theatre.memory(0).tensor("server.rows").any()  # else the copy would have come after the return


def test_small_rows_are_copied_at_once(theatre: Theatre) -> None:
    copies = LateCopies(theatre.board, 0, lambda generation: None)
    value = torch.ones(LENGTH - 1)
    copies.begin((value,))
    assert not copies.write(torch.zeros(LENGTH - 1), value)
    assert not any(theatre.board.copying)
