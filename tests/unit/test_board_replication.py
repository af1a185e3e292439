"""Boards of two nodes kept alike: words go both ways, and only those that may."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from remote_ends import opened, small

from paceline.network.nodes.board_replication import PAIR, BoardReplica
from paceline.network.secure.channel import ProtocolError
from paceline.processes.memory.board import FAILED, GENERATION, RUNNING, STOP, STOPPING, Board
from paceline.processes.memory.run_memory import RunMemory


@dataclass
class Both:
    """Two boards, and what each side knows of the other's."""

    one: Board
    other: Board
    ahead: int = 0  # the other's clock, ns

    def __post_init__(self) -> None:
        self.here, self.there = BoardReplica(self.one, self.ahead), BoardReplica(self.other)  # one side shifts for both

    def tell(self) -> bytes:
        """From one to the other; gives what was said."""
        news = self.here.news()
        self.there.hear(news)
        return news

    def answer(self) -> bytes:
        news = self.there.news()
        self.here.hear(news)
        return news


@pytest.fixture
def both() -> Both:
    return Both(Board.create(3, 2), Board.create(3, 2))


def pairs(*rows: tuple[int, int]) -> bytes:
    return np.array(rows, dtype=np.int64).tobytes()


def test_only_what_has_changed_is_told(both: Both) -> None:
    assert both.tell() == b""
    both.one.t[1], both.one.loss[2] = 7, 0.25
    assert len(both.tell()) == 2 * PAIR
    assert (both.other.t[1], both.other.loss[2]) == (7, 0.25)
    assert both.tell() == b""
    assert both.answer() == b""  # what was heard is not said back


def test_both_sides_tell_their_own(both: Both) -> None:
    both.one.t[0], both.other.t[1] = 1, 2
    both.tell()
    both.answer()
    assert both.one.t.tolist() == both.other.t.tolist() == [1, 2, 0]


def test_a_word_that_goes_back_to_what_it_was_is_told(both: Both) -> None:
    both.one.t[0] = 1
    both.tell()
    both.one.t[0] = 0
    both.tell()
    assert both.other.t[0] == 0


def test_withheld_words_are_told_when_they_no_longer_are(both: Both) -> None:
    number = both.one.number("t", 1)
    both.here.withheld = frozenset({number})
    both.one.t[0], both.one.t[1] = 5, 6
    both.tell()
    assert both.other.t.tolist() == [5, 0, 0]
    both.here.withheld = frozenset()
    both.tell()
    assert both.other.t.tolist() == [5, 6, 0]


def test_a_nodes_own_words_stay_there(both: Both) -> None:
    both.one.posted[0], both.one.sleeping[0], both.one.ring[0] = 1, 1, 1
    assert both.tell() == b""


def test_times_are_by_the_clock_of_the_process_that_reads_them() -> None:
    both = Both(Board.create(2, 1), Board.create(2, 1), ahead=1000)
    both.one.t[1] = 50
    both.one.put("began", 7)
    both.tell()
    assert (both.other.t[1], both.other.get("began")) == (50, 1007)
    assert both.other.get("stopped") == 0  # nothing yet is no time


def test_a_time_comes_back_as_it_was() -> None:
    both = Both(Board.create(2, 1), Board.create(2, 1), ahead=1000)
    both.one.put("stopped", 50)
    both.tell()
    assert both.other.get("stopped") == 1050
    both.other.put("stopped", 2000)
    both.answer()
    assert both.one.get("stopped") == 1000


def test_nobody_takes_a_stop_back(both: Both) -> None:
    both.other.run[STOP] = FAILED
    both.one.run[STOP] = STOPPING
    both.tell()
    assert both.other.run[STOP] == FAILED
    both.answer()
    assert both.one.run[STOP] == FAILED
    both.there.hear(pairs((STOP, RUNNING)))
    assert both.other.run[STOP] == FAILED


@pytest.mark.parametrize("number", [-1, -(1 << 63), (1 << 63) - 1, None])
def test_a_word_beyond_the_board_is_refused_and_nothing_is_written(both: Both, number: int | None) -> None:
    before = both.one.words.tobytes()
    with pytest.raises(ProtocolError, match="beyond"):
        both.here.hear(pairs((both.one.number("t", 0), 5), (both.one.common if number is None else number, 1)))
    assert both.one.words.tobytes() == before


@pytest.mark.parametrize("size", [1, 8, 15, 17, 24])
def test_half_a_pair_is_refused(both: Both, size: int) -> None:
    with pytest.raises(ProtocolError, match="no pairs"):
        both.here.hear(bytes(size))


class Noting:
    """A run's words that note in which order they are written, and what stood elsewhere then."""

    order: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, board: Board) -> None:
        self._board, self._words = board, board.run

    def __getitem__(self, at: int) -> int:
        return int(self._words[at])

    def __setitem__(self, at: int, value: int) -> None:
        self.order.append((at, self._board.t[0]))
        self._words[at] = value


def test_the_words_of_the_run_come_last_and_of_them_the_generation_and_the_stop(both: Both) -> None:
    both.one.t[0] = 3
    for name in ("stop", "ready", "generation", "restore"):
        both.one.put(name, 1)
    noting = Noting(both.other)
    Noting.order.clear()
    both.other.run = noting  # type: ignore[assignment]
    both.tell()
    written = [at for at, _ in noting.order]
    assert sorted(written[-2:]) == sorted((GENERATION, STOP))
    assert len(written) == 4
    assert all(t == 3 for _, t in noting.order)  # all others were there already


# versions


@pytest.fixture
def stages() -> Iterator[tuple[RunMemory, RunMemory, BoardReplica, BoardReplica]]:
    with small(0, 1) as (here, _), small(1, 0) as (there, _):
        one, other = opened(here, 0, 0), opened(there, 1, 0)
        mirrors = BoardReplica(here.board), BoardReplica(there.board)
        for mirror, memory in zip(mirrors, (one, other), strict=True):
            mirror.open(memory)
        mirrors[1].hear(mirrors[0].news())
        mirrors[0].hear(mirrors[1].news())
        yield one, other, *mirrors


Stages = tuple[RunMemory, RunMemory, BoardReplica, BoardReplica]


def test_versions_are_told(stages: Stages) -> None:
    one, other, here, there = stages
    one.set_version(0, 12)
    there.hear(here.news())
    assert other.versions() == [12]
    assert here.news() == b""
    assert there.news() == b""


def test_versions_that_are_anothers_are_not_told(stages: Stages) -> None:
    one, other, here, there = stages
    one.set_version(0, 12)
    there.hear(here.news(mine=[False]))
    assert other.versions() == [0]
    there.hear(here.news(mine=[True]))
    assert other.versions() == [12]


def test_a_version_that_an_answer_has_brought_is_not_lowered(stages: Stages) -> None:
    one, other, here, there = stages
    one.set_version(0, 12)
    news = here.news()
    other.set_version(0, 14)
    there.hear(news)
    assert other.versions() == [14]


def test_a_return_to_a_checkpoint_lowers_it(stages: Stages) -> None:
    one, other, here, there = stages
    one.set_version(0, 12)
    there.hear(here.news())
    one.board.put("generation", 1)
    there.hear(here.news())
    one.set_version(0, 5)
    there.hear(here.news())
    assert other.versions() == [5]


def test_a_version_that_there_is_not_is_refused(stages: Stages) -> None:
    one, _, here, _ = stages
    with pytest.raises(ProtocolError, match="beyond"):
        here.hear(pairs((one.board.common + 1, 5)))
