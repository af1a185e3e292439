"""Words that processes share, and bells that wake them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
from memory_fixture import PATIENCE, Company, played

from paceline.processes.memory.board import (
    FAILED,
    MAILBOXES,
    RUN,
    RUNNING,
    SERVER,
    STOP,
    STOPPING,
    WORDS,
    WORKER,
    Board,
)
from paceline.processes.memory.spinning import Spinning
from paceline.processes.memory.wakeup import Wakeup


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board.create(3, 2)
    yield made
    os.close(made.descriptor)


@pytest.fixture
def ends(board: Board) -> Iterator[list[int]]:
    made = Wakeup.create(board.roles)
    yield made
    for descriptor in made:
        os.close(descriptor)


class TestWords:
    def test_no_two_words_share_a_place(self, board: Board) -> None:
        fields = [board.run, *(getattr(board, name) for name in (*WORKER, *SERVER))]
        fields += [board.sleeping, board.posted, *board.answered, *board.joint, board.ring, board.evaluator_words]
        number = 0
        for field in fields:
            for index in range(len(field)):
                assert field[index] == 0
                number += 1
                field[index] = number
        assert sum(len(field) for field in fields) == number
        expected = 0
        for field in fields:
            assert field.tolist() == list(range(expected + 1, expected + 1 + len(field)))
            expected += len(field)

    def test_other_processes_see_them(self, board: Board) -> None:
        def write() -> None:
            board.put("goal", 77)
            board.t[2] = 5
            board.loss[1] = 0.5

        played(write)
        assert (board.get("goal"), board.t[2], board.loss[1]) == (77, 5, 0.5)

    def test_places(self, board: Board) -> None:
        assert [board.mailbox(2, number) for number in range(MAILBOXES)] == list(range(2 * MAILBOXES, 3 * MAILBOXES))
        assert [board.server_place(shard) for shard in range(2)] == [3, 4]
        assert (board.evaluator, board.launcher, board.roles) == (5, 6, 7)
        assert board.run[STOP] == RUNNING
        board.put("stop", STOPPING)
        assert board.run[STOP] == STOPPING

    def test_a_stop_has_a_time_and_only_becomes_graver(self, board: Board) -> None:
        assert board.get("stopped") == 0
        board.stop(STOPPING)
        first = board.get("stopped")
        assert (board.run[STOP], first > 0) == (STOPPING, True)
        board.stop(FAILED)
        board.stop(STOPPING)
        assert (board.run[STOP], board.get("stopped")) == (FAILED, first)

    def test_every_word_says_what_it_means_and_who_writes_it(self) -> None:
        assert {*RUN, *WORKER, *SERVER} == set(WORDS)
        assert all(word.meaning and word.writer for word in WORDS.values())


class TestBells:
    def test_what_is_so_already_needs_no_waiting(self, board: Board, ends: list[int]) -> None:
        assert Wakeup(board, ends, 0).wait(lambda: True, 0.0) is True

    def test_it_gives_up_after_its_time(self, board: Board, ends: list[int]) -> None:
        assert Wakeup(board, ends, 0).wait(lambda: False, 0.01) is False
        assert board.sleeping[0] == 0

    @pytest.mark.parametrize("limit", [0, 50_000])
    def test_a_glance_is_short_and_looks_only_where_roles_spin(self, limit: int, board: Board, ends: list[int]) -> None:
        looks: list[bool] = []
        wakeup = Wakeup(board, ends, 0, Spinning(limit))
        assert wakeup.glance(lambda: looks.append(True) or True) is bool(looks) is bool(limit)  # type: ignore[func-returns-value]
        assert wakeup.glance(lambda: False) is False

    def test_a_sleeping_process_is_woken(self, board: Board, ends: list[int]) -> None:
        def sleep() -> None:
            assert Wakeup(board, ends, 1).wait(lambda: bool(board.get("ready")), PATIENCE)

        sleeper = Company(sleep)
        assert _asleep(board)
        board.put("ready", 1)
        Wakeup(board, ends, 0).ring(1)
        assert sleeper.end() == [0]

    def test_who_does_not_sleep_is_not_rung(self, board: Board, ends: list[int]) -> None:
        Wakeup(board, ends, 0).ring_all()
        with pytest.raises(BlockingIOError):
            os.read(ends[0], 1)

    def test_ringing_never_blocks(self, board: Board, ends: list[int]) -> None:
        board.sleeping[1] = 1
        wakeup = Wakeup(board, ends, 0)
        for _ in range(100_000):
            wakeup.ring(1)
        wakeup.ring_all()

    @pytest.mark.parametrize("spin", [0, 50_000])
    def test_no_ring_is_lost(self, spin: int, board: Board, ends: list[int]) -> None:
        """Two processes hand a word to and fro: a single lost ring would leave both asleep."""
        rounds = 5000

        def player(me: int) -> None:
            wakeup = Wakeup(board, ends, me, Spinning(spin))
            for number in range(me, 2 * rounds, 2):
                if not wakeup.wait(lambda number=number: board.get("ordered") == number, PATIENCE):
                    raise AssertionError(f"slept through round {number}")
                board.put("ordered", number + 1)
                wakeup.ring(1 - me)

        played(lambda: player(0), lambda: player(1))
        assert board.get("ordered") == 2 * rounds


def _asleep(board: Board) -> bool:
    """Whether the other one has gone to sleep."""
    pause = threading.Event()
    for _ in range(10_000):
        if board.sleeping[1]:
            return True
        pause.wait(0.001)
    return False
