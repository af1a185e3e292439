"""A worker that cannot reach a server: what the hub says of it, and when the run goes on without it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from paceline.network.nodes.routes import Routes
from paceline.processes.memory.board import Board

PATIENCE = 10.0


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board.create(3, 1)
    for rank in range(3):
        made.alive[rank], made.node[rank] = 1, rank
    made.server_port[0], made.server_node[0] = 4000, 5
    yield made
    os.close(made.descriptor)


def cut(board: Board, rank: int, seconds: float) -> None:
    board.unreached_server[rank], board.unreached[rank] = 0, time.monotonic_ns() - int(seconds * 1e9)


def routes(board: Board, told: list[str]) -> Routes:
    return Routes(board, PATIENCE, told.append, lambda rank: f"worker:{rank} on h{rank}")


def test_it_is_told_soon_and_given_up_after_patience_once(board: Board) -> None:
    told: list[str] = []
    looking = routes(board, told)
    cut(board, 1, 1.0)
    assert not looking.look()
    assert not told
    cut(board, 1, 4.0)
    assert not looking.look()
    assert told == ["worker:1 on h1 cannot reach server:0, which listens; it keeps trying"]
    cut(board, 1, 11.0)
    assert looking.look() == [1]
    assert not looking.look()
    board.alive[1] = 0
    assert not looking.look()
    board.unreached[1] = 0
    looking.look()
    assert len(told) == 2
    assert "worker:1 on h1 reaches server:0 again" in told[1]


def test_others_have_patience_until_it_is_decided(board: Board) -> None:
    looking = routes(board, [])
    before = board.get("alarm")
    looking.look()
    assert board.get("alarm") == before
    cut(board, 2, 1.0)
    looking.look()
    assert board.get("alarm") > before


def test_a_server_that_nobody_reaches_is_not_the_workers_fault(board: Board) -> None:
    looking = routes(board, [])
    for rank in range(3):
        cut(board, rank, 100.0)
    assert not looking.look()


def test_a_server_that_does_not_listen_or_a_node_that_is_lost_is_another_matter(board: Board) -> None:
    told: list[str] = []
    looking = routes(board, told)
    cut(board, 1, 100.0)
    board.server_port[0] = 0
    assert not looking.look()
    board.server_port[0] = 4000
    board.node[1] = -1
    assert not looking.look()
    assert not told
