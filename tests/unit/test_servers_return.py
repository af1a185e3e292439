"""An answer belongs to one call of one life: around a return to a checkpoint, and in a lane that is used again."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from memory_fixture import Theatre
from test_call_client import LENGTH, Ledgered

from paceline.config import build
from paceline.network.calls.tcp_client import TcpClient
from paceline.processes.calls.mailbox import Mailbox
from paceline.processes.memory import snapshot
from paceline.processes.memory.board import MAILBOXES
from paceline.processes.memory.packed_words import generation_of
from paceline.processes.roles.control_channel import Control
from paceline.processes.roles.roles import Role
from paceline.processes.roles.server import Server
from paceline.processes.roles.worker_session import WorkerSession
from paceline.processes.supervisor.recovery import Recovery
from paceline.runs.run_directory import RunDirectory


@pytest.fixture
def theatre(tmp_path: Path) -> Iterator[Theatre]:
    made = Theatre(Ledgered(), torch.arange(float(LENGTH)), servers=1, directory=tmp_path)
    memory = made.memory(0)
    snapshot.keep_all(memory)
    snapshot.write(memory, "chief", {})
    yield made
    made.close()


def server_of(theatre: Theatre) -> Server:
    return Server(theatre.memory(theatre.board.server_place(0)), 0)


def go_back(theatre: Theatre) -> None:
    """What a launcher does when a server has died inside a call."""
    theatre.board.put("restore", 0)
    theatre.board.put("generation", 1)


def test_a_return_answers_only_what_was_sent_before_it(theatre: Theatre) -> None:
    server, scheme = server_of(theatre), Ledgered()
    before, after = theatre.link(0), theatre.link(1)
    old = before.post(scheme.fill(1.0))
    go_back(theatre)
    after.generation = 1
    new = after.post(scheme.fill(2.0))  # sent by one who is back before the server is
    server._return()
    assert before.ready(old)  # void
    assert not after.ready(new)
    assert server._lead_on()
    assert after.ready(new)
    assert after.collect(new) == 1
    assert theatre.memory(0).tensor("server.x").tolist() == [2.0] * LENGTH


def test_an_answer_is_to_the_call_that_was_taken(theatre: Theatre) -> None:
    """A successor may use the lane while its predecessor's call is still being performed."""
    server, scheme, board = server_of(theatre), Ledgered(), theatre.board
    mailbox = theatre.link(0).post(scheme.fill(1.0))
    number = board.posted[mailbox.index]
    done = server.scheduler.done

    def used_again_meanwhile(at: object) -> None:
        board.posted[mailbox.index] = number + 1
        done(at)  # type: ignore[arg-type]

    server.scheduler.done = used_again_meanwhile  # type: ignore[method-assign]
    server._lead_on()
    assert board.answered[0][mailbox.index] == number


def test_nobody_reads_what_the_servers_have_gone_back_to_as_if_it_were_the_old_course(theatre: Theatre) -> None:
    server, scheme = server_of(theatre), Ledgered()
    link = theatre.link(0)
    assert link._look(scheme.methods["look"], ())[0]
    go_back(theatre)
    server._return()
    assert not link._look(scheme.methods["look"], ())[0]
    link.generation = 1
    assert link._look(scheme.methods["look"], ())[0]
    assert theatre.board.server_generation[0] == 1
    assert generation_of(theatre.board.posted[0]) == 0


def recovery_of(theatre: Theatre) -> Recovery:
    """That of a launch which has gone back to the first checkpoint."""
    memory = theatre.memory(theatre.board.launcher)
    launched: Any = SimpleNamespace(plan=theatre.plan, board=theatre.board, memory=memory)
    made = Recovery(launched, RunDirectory(Path(theatre.plan.directory)), lambda *_: None)
    made.restored = snapshot.find(memory, 0)
    return made


def test_the_last_part_of_a_worker_that_has_gone_is_left_to_the_chief(theatre: Theatre) -> None:
    """Set back by the launcher, only its cells would be: what it has put aside for the last checkpoint would stay."""
    board, recovery = theatre.board, recovery_of(theatre)
    go_back(theatre)
    board.alive[1], board.t[1] = 0, 7
    board.parted[1] = 1
    recovery.restore_absent(Role("worker", 1))
    assert (board.followed[1], board.t[1]) == (0, 7)
    board.parted[1] = 0  # dead, and to be restarted
    recovery.restore_absent(Role("worker", 1))
    assert (board.followed[1], board.t[1]) == (1, 0)


def test_a_successor_does_not_send_again_what_its_predecessor_had_sent(theatre: Theatre) -> None:
    """Over connections, a call that was posted and is not answered is sent again; by who has posted it."""
    board = theatre.board
    mailbox = theatre.link(0).post(Ledgered().fill(1.0))
    assert board.answered[0][mailbox.index] != board.posted[mailbox.index]
    board.server_node[0] = 1  # on another node
    memory = theatre.memory(0)
    mailboxes = [Mailbox(memory, 0, number) for number in range(MAILBOXES)]
    reach = TcpClient(memory, 0, mailboxes, lambda: True)
    assert len(reach) == 1
    assert board.answered[0][mailbox.index] == board.posted[mailbox.index]


def test_a_life_that_the_launcher_has_set_back_meanwhile_stands_where_its_cells_stand(theatre: Theatre) -> None:
    """The launcher may restore a worker's cells after the new process has read where its predecessor stood."""
    board = theatre.board
    board.t[1], board.gradients[1] = 20, 20
    ours, theirs = socket.socketpair()
    with ours, theirs:
        session = WorkerSession(theatre.memory(1), build.task_of("toy", {}), 1, [], Control(theirs))
        board.t[1], board.gradients[1] = 7, 7
        session.membership.enter()
    assert session.worker.t == 7
    board.gradients[1] = 9
    session.cells.uncount()
    assert board.gradients[1] == 7
