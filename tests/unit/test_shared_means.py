"""Means between forked processes: weights, groups, and the death of a member on the way."""

from __future__ import annotations

import os
import signal
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from memory_fixture import PATIENCE, Company, Theatre, waiting

from paceline.collectives.shared import SharedCollective
from paceline.errors import SchemeError
from paceline.ops import Mean
from paceline.processes.means.mean_form import SMALL, SharedMean
from paceline.processes.means.shared_means import SharedMeans
from paceline.processes.means.vector_sums import BLOCK
from paceline.scheme import Scheme
from paceline.state import Vector, mean_of

LARGE = SMALL // 4 + 3  # numbers of 4 bytes: each of three reduces a slice, cut unevenly,
HUGE = 3 * (BLOCK // 4) + 8  # or a slice of more than one block


@dataclass(frozen=True)
class Plain(Scheme, name="plain"):
    """Has no server."""


@dataclass(frozen=True)
class Pairs(Plain, name="pairs"):
    """A restarted worker prefers the cells of the other worker of its pair."""

    def donors(self, rank: int, workers: int) -> Sequence[int]:
        return sorted(range(workers), key=lambda other: other // 2 != rank // 2)


class Band(Theatre):
    """Workers that come to means; what each takes home stays in its row of `results`."""

    def __init__(self, length: int, workers: int = 3, scheme: Scheme | None = None, **plan: str) -> None:
        super().__init__(scheme or Plain(), torch.zeros(length), workers=workers, servers=0, **plan)
        self.results = torch.zeros(workers, length).share_memory_()

    def means(self, rank: int) -> SharedMeans:
        memory = self.memory(rank)
        return SharedMeans(memory, rank, waiting(memory))

    def until(self, rank: int, ready: Callable[[], bool]) -> None:
        wakeup = self.memory(rank).wakeup
        wakeup.restless = lambda: True  # nobody wakes who is at no mean
        assert wakeup.wait(ready, PATIENCE)

    def at_mean(self, rank: int, weight: float = 1.0, among: Sequence[int] | None = None) -> None:
        op = Mean(vector_of(rank, self.results.shape[1]), weight, None if among is None else tuple(among))
        self.results[rank] = self.means(rank).mean(op, first=True)


def vector_of(rank: int, length: int, number: int = 0) -> Vector:
    return torch.randn(length, generator=torch.Generator().manual_seed(100 * number + rank))


lengths = pytest.mark.parametrize("length", [5, LARGE], ids=["small", "large"])
more_lengths = pytest.mark.parametrize("length", [0, 2, 5, LARGE, HUGE])


@more_lengths
def test_everybody_gets_the_same_bits(length: int) -> None:
    band = Band(length)
    assert Company(*(lambda r=rank: band.at_mean(r) for rank in range(3))).end() == [0, 0, 0]
    expected = mean_of([vector_of(rank, length) for rank in range(3)], [1.0] * 3)
    assert all(torch.equal(row, expected) for row in band.results)
    band.close()


@more_lengths
def test_two_workers_each_add_up_both(length: int) -> None:
    band = Band(length, workers=2)
    assert Company(*(lambda r=rank: band.at_mean(r) for rank in range(2))).end() == [0, 0]
    assert not any(band.board.reduced)
    expected = mean_of([vector_of(rank, length) for rank in range(2)], [1.0] * 2)
    assert all(torch.equal(row, expected) for row in band.results)
    band.close()


@more_lengths
def test_weights(length: int) -> None:
    band, weights = Band(length), [0.5, 2.0, 0.25]
    assert Company(*(lambda r=rank: band.at_mean(r, weights[r]) for rank in range(3))).end() == [0, 0, 0]
    expected = mean_of([vector_of(rank, length) for rank in range(3)], weights)
    assert all(torch.equal(row, expected) for row in band.results)
    band.close()


@more_lengths
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_result_is_written_to_the_cell_that_it_will_be_stored_in(length: int, workers: int) -> None:
    """Also if the cell is the worker's own vector, which other members read where it is."""
    band = Band(length, workers=workers)
    expected = mean_of([vector_of(rank, length) for rank in range(workers)], [1.0] * workers)

    def play(rank: int) -> None:
        means = band.means(rank)
        cell = means.memory.worker_state(rank).x
        for _ in range(3):
            cell.copy_(vector_of(rank, length))
            busy = band.board.busy[rank]
            assert means.mean(Mean(cell, into=(cell,)), first=True) is cell
            assert torch.equal(cell, expected)
            assert band.board.busy[rank] == busy + 2

    assert Company(*(lambda r=rank: play(r) for rank in range(workers))).end() == [0] * workers
    band.close()


@lengths
def test_a_cell_of_another_kind_gets_no_result(length: int) -> None:
    band = Band(length, workers=1)
    means, v = band.means(0), vector_of(0, length)
    for cell in (torch.zeros(length + 1), torch.zeros(length, dtype=torch.float64), torch.zeros(1, length)):
        assert means.mean(Mean(v, into=(cell,)), first=True) is not cell
        assert not cell.any()
    band.close()


class Late(SharedMeans):
    """As with vectors in the memory of a GPU: its work goes on after `leave`, until it is waited for."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._on_gpu = True


@lengths
def test_a_gpu_has_finished_a_mean_when_its_worker_comes_to_the_next_one(length: int) -> None:
    """Until then its reads are not over, and nobody takes the vectors away."""
    band = Band(length, workers=2)

    def play(rank: int) -> None:
        memory = band.memory(rank)
        means, board = Late(memory, rank, waiting(memory)), band.board
        for number in range(1, 30):
            result = means.mean(Mean(vector_of(rank, length, number)), first=True)
            assert torch.equal(result, mean_of([vector_of(other, length, number) for other in range(2)], [1.0] * 2))
            assert (board.at_seq[rank], board.finished[rank]) == (number, number - 1)
        assert not any(board.reduced)  # two members on a GPU each add up both, however long the vector is
        means.forget()
        assert board.finished[rank] == board.at_seq[rank]

    assert Company(*(lambda r=rank: play(r) for rank in range(2))).end() == [0, 0]
    band.close()


def test_means_of_groups_on_a_gpu_are_finished_at_once() -> None:
    band = Band(5, workers=3)

    def play(rank: int) -> None:
        memory = band.memory(rank)
        means = Late(memory, rank, waiting(memory))
        for _ in range(5):
            for among in ((0, 1), (1, 2), None):
                if among is None or rank in among:
                    means.mean(Mean(vector_of(rank, 5), 1.0, among), first=True)
                    assert band.board.finished[rank] == band.board.at_seq[rank]

    assert Company(*(lambda r=rank: play(r) for rank in range(3))).end() == [0] * 3
    band.close()


def test_who_dies_while_it_writes_a_result_leaves_a_cell_that_is_not_whole() -> None:
    band = Band(LARGE, workers=3)

    class Deadly(torch.Tensor):
        def copy_(self, *_: Any, **__: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

    def die() -> None:
        means = band.means(2)
        cell = means.memory.worker_state(2).x.as_subclass(Deadly)
        means.mean(Mean(vector_of(2, LARGE), into=(cell,)), first=True)

    codes = Company(lambda: band.at_mean(0), lambda: band.at_mean(1), die).end()
    assert codes == [0, 0, -signal.SIGKILL]
    assert [band.board.busy[rank] % 2 for rank in range(3)] == [0, 0, 1]
    band.close()


@lengths
def test_groups_do_not_wait_for_each_other(length: int) -> None:
    band = Band(length, workers=4)
    first = Company(*(lambda r=rank: band.at_mean(r, among=(1, 3)) for rank in (1, 3)))
    assert first.end() == [0, 0]
    second = Company(*(lambda r=rank: band.at_mean(r, among=(0, 2)) for rank in (0, 2)))
    assert second.end() == [0, 0]
    for group in ((0, 2), (1, 3)):
        expected = mean_of([vector_of(rank, length) for rank in group], [1.0, 1.0])
        assert all(torch.equal(band.results[rank], expected) for rank in group)
    band.close()


@pytest.mark.parametrize(("length", "rounds"), [(5, 400), (LARGE, 30)], ids=["small", "large"])
def test_many_in_a_row(length: int, rounds: int) -> None:
    """Nobody may overwrite what another still reads: the quickest is as far ahead as it can be."""
    band = Band(length)

    def play(rank: int) -> None:
        means = band.means(rank)
        for number in range(rounds):
            result = means.mean(Mean(vector_of(rank, length, number), 1.0, None), first=True)
            expected = mean_of([vector_of(other, length, number) for other in range(3)], [1.0] * 3)
            assert torch.equal(result, expected), f"worker {rank}, mean {number}"

    assert Company(*(lambda r=rank: play(r) for rank in range(3))).end() == [0, 0, 0]
    band.close()


@pytest.mark.parametrize("met", [False, True], ids=["at first", "after a mean of both"])
def test_a_restarted_worker_has_not_arrived_before_it_says_so(met: bool) -> None:
    """Its predecessor died inside a mean. Seen while the successor announces its first one, that is no arrival."""
    band = Band(5, workers=2)
    board, chief, before = band.board, band.means(0), band.means(1)
    if met:  # the chief expects that all who took part come again
        first = before.arrive(Mean(vector_of(1, 5), 1.0, None), first=True)
        chief.mean(Mean(vector_of(0, 5), 1.0, None), first=True)
        before.leave(first)
        assert chief.decisions.last is not None
    before.arrive(Mean(vector_of(1, 5), 1.0, None), first=True)
    band.died(1)
    if not met:
        chief.mean(Mean(vector_of(0, 5), 1.0, None), first=True)
    board.alive[1] = 1
    meeting = chief.arrive(Mean(vector_of(0, 5, 1), 1.0, None), first=True)
    decided: list[bool] = []

    class Watched:
        """The words of the workers' keys; the chief looks after each that is written."""

        def __init__(self, words: Any) -> None:
            self._words = words

        def __getitem__(self, rank: int) -> int:
            return int(self._words[rank])

        def tolist(self) -> list[int]:
            return list(self._words)

        def __setitem__(self, rank: int, key: int) -> None:
            self._words[rank] = key
            decided.append(chief.decisions.decide(meeting))

    board.at_key = Watched(board.at_key)  # type: ignore[assignment]
    other = band.means(1)
    joined = other.arrive(Mean(vector_of(1, 5, 1), 1.0, None), first=True)
    assert decided == [False]
    expected = mean_of([vector_of(rank, 5, 1) for rank in range(2)], [1.0, 1.0])
    assert torch.equal(chief.leave(meeting), expected)
    assert torch.equal(other.leave(joined), expected)
    band.close()


def test_means_of_several_shapes_and_groups_in_turn() -> None:
    """All of them, a part, another group, and with weights: what is kept from one mean is not used for another."""
    band, rounds = Band(LARGE), 12

    def op(rank: int, number: int) -> Mean:
        length = (LARGE, 7, 70_000, 5)[number % 4]
        return Mean(
            vector_of(rank, LARGE, number)[3 : 3 + length],
            (1.0, 1.0 + rank)[number % 3 == 2],
            (0, 2) if number % 4 == 3 else None,
        )

    def play(rank: int) -> None:
        means = band.means(rank)
        for number in range(rounds):
            mine = op(rank, number)
            members = mine.among or (0, 1, 2)
            if rank in members:
                ops = [op(other, number) for other in members]
                expected = mean_of([one.v for one in ops], [one.weight for one in ops])
                assert torch.equal(means.mean(mine, first=True), expected), f"worker {rank}, mean {number}"

    assert Company(*(lambda r=rank: play(r) for rank in range(3))).end() == [0, 0, 0]
    band.close()


@lengths
def test_a_member_that_dies_before_it_arrives_is_not_waited_for(length: int) -> None:
    band = Band(length)
    others = Company(*(lambda r=rank: band.at_mean(r) for rank in range(2)))
    band.died(2)
    assert others.end() == [0, 0]
    expected = mean_of([vector_of(rank, length) for rank in range(2)], [1.0, 1.0])
    assert all(torch.equal(band.results[rank], expected) for rank in range(2))
    band.close()


@lengths
def test_a_member_that_dies_before_the_decision_is_left_out(length: int) -> None:
    band = Band(length)

    def arrive_and_die() -> None:
        band.means(2).arrive(Mean(vector_of(2, length), 1.0, None), first=True)
        os._exit(9)

    assert Company(arrive_and_die).end() == [9]
    band.died(2)
    assert Company(*(lambda r=rank: band.at_mean(r) for rank in range(2))).end() == [0, 0]
    expected = mean_of([vector_of(rank, length) for rank in range(2)], [1.0, 1.0])
    assert all(torch.equal(band.results[rank], expected) for rank in range(2))
    band.close()


@lengths
@pytest.mark.parametrize("victim", [0, 2], ids=["who decided", "another"])
def test_a_member_that_dies_after_the_decision_still_counts(length: int, victim: int) -> None:
    """Its vector lies in shared memory; its slice is done by another."""
    band = Band(length)

    def die_in_the_middle() -> None:
        means = band.means(victim)
        meeting = means.arrive(Mean(vector_of(victim, length), 1.0, None), first=True)
        band.until(victim, lambda: means.decisions.decided(meeting) or means.decisions.decide(meeting))
        os._exit(9)

    rest = [rank for rank in range(3) if rank != victim]
    company = Company(die_in_the_middle, *(lambda r=rank: band.at_mean(r) for rank in rest))
    assert company.end(0) == [9]
    band.died(victim)
    assert company.end(1, 2) == [0, 0]
    expected = mean_of([vector_of(rank, length) for rank in range(3)], [1.0] * 3)
    assert all(torch.equal(band.results[rank], expected) for rank in rest)
    band.close()


def test_the_slice_of_a_dead_member_does_not_wait_for_those_of_the_living() -> None:
    """Nobody wakes the member that reduces it when a living one, which is last, has finished."""
    band = Band(LARGE, workers=4)

    def decided(rank: int) -> tuple[SharedMeans, SharedMean]:
        means = band.means(rank)
        meeting = means.arrive(Mean(vector_of(rank, LARGE), 1.0, None), first=True)
        band.until(rank, lambda: means.decisions.decided(meeting))
        return means, meeting

    def die() -> None:
        decided(1)
        os._exit(9)

    def be_last() -> None:
        means, meeting = decided(3)
        band.until(3, lambda: band.board.reduced[1] == 1)
        band.results[3] = means.leave(meeting)

    company = Company(die, be_last, lambda: band.at_mean(0), lambda: band.at_mean(2))
    assert company.end(0) == [9]
    band.died(1)
    assert company.end(1, 2, 3) == [0, 0, 0]
    expected = mean_of([vector_of(rank, LARGE) for rank in range(4)], [1.0] * 4)
    assert all(torch.equal(band.results[rank], expected) for rank in (0, 2, 3))
    band.close()


def test_a_decision_is_not_replaced_while_a_member_reads_it() -> None:
    """The member that decides for two groups sleeps until the first group's slow member has finished."""
    band = Band(5)
    slow = band.means(1)

    def read_slowly() -> None:
        meeting = slow.arrive(Mean(vector_of(1, 5), 1.0, (0, 1)), first=True)
        band.until(1, lambda: slow.decisions.decided(meeting))
        band.until(1, lambda: bool(band.board.held[0]))
        band.results[1] = slow.leave(meeting)

    def decide_twice() -> None:
        means = band.means(0)
        means.mean(Mean(vector_of(0, 5), 1.0, (0, 1)), first=True)
        band.results[0] = means.mean(Mean(vector_of(0, 5, 1), 1.0, (0, 2)), first=True)

    company = Company(read_slowly, decide_twice, lambda: band.at_mean(2, among=(0, 2)))
    assert company.end() == [0, 0, 0]
    assert torch.equal(band.results[1], mean_of([vector_of(0, 5), vector_of(1, 5)]))
    assert torch.equal(band.results[0], mean_of([vector_of(0, 5, 1), vector_of(2, 5)]))
    assert torch.equal(band.results[0], band.results[2])
    assert not any(band.board.held)
    band.close()


def test_only_the_last_arrival_wakes_the_member_that_decides() -> None:
    band = Band(5)
    band.means(0).arrive(Mean(vector_of(0, 5), 1.0, None), first=True)
    band.board.sleeping[0] = band.board.sleeping[1] = 1
    pipes = band.memory(0).wakeup.descriptors
    band.means(1).arrive(Mean(vector_of(1, 5), 1.0, None), first=True)
    with pytest.raises(BlockingIOError):
        os.read(pipes[0], 1)
    band.means(2).arrive(Mean(vector_of(2, 5), 1.0, None), first=True)
    assert os.read(pipes[0], 9) == b"!"
    with pytest.raises(BlockingIOError):
        os.read(pipes[2], 1)
    band.close()


def test_under_hold_the_dead_are_waited_for() -> None:
    band = Band(5, quorum="hold")
    others = Company(*(lambda r=rank: band.at_mean(r) for rank in range(2)))
    band.died(2)
    band.until(2, lambda: bool(band.board.at_seq[0] and band.board.at_seq[1]))
    assert not any(band.board.row_valid)
    band.board.alive[2] = 1
    assert Company(lambda: band.at_mean(2)).end() == [0]
    assert others.end() == [0, 0]
    assert torch.equal(band.results[0], mean_of([vector_of(rank, 5) for rank in range(3)], [1.0] * 3))
    band.close()


@pytest.mark.parametrize("quorum", ["shrink", "hold"])
def test_a_restarted_worker_gets_the_cells_of_a_member_that_is_behind(quorum: str) -> None:
    """Of one whose mean it is missing from: workers at later steps wait for that member in any case."""
    band = Band(5, workers=4, scheme=Pairs(), quorum=quorum)
    board, among = band.board, (2, 3)
    board.alive[3], board.joining[3] = 0, 1
    board.t[:] = array("q", [4, 4, 1, 0])
    ahead, behind = band.means(0), band.means(2)
    for means in (ahead, band.means(1)):
        means.arrive(Mean(vector_of(0, 5), 1.0, None), first=True)
    assert not ahead._is_decided()
    assert board.grant[3] == 0
    behind.arrive(Mean(vector_of(2, 5), 1.0, among), first=True)
    assert not behind._is_decided()
    assert not ahead._is_decided()
    assert board.grant[3] == 1 + 2
    band.close()


def test_a_restarted_worker_gets_the_cells_of_the_member_that_decides_where_none_is_behind() -> None:
    band = Band(5, workers=4, scheme=Pairs(), quorum="hold")
    board = band.board
    board.alive[3], board.joining[3] = 0, 1
    board.t[:] = array("q", [4, 4, 4, 0])
    means = band.means(0)
    for one in (means, band.means(1), band.means(2)):
        one.arrive(Mean(vector_of(0, 5), 1.0, None), first=True)
    assert not means._is_decided()
    assert board.grant[3] == 1 + 0
    band.close()


def test_an_abandoned_mean_is_left() -> None:
    length = 5
    band = Band(length)
    means = band.means(0)
    means.arrive(Mean(vector_of(0, length), 1.0, None), first=True)
    means.forget()
    company = Company(*(lambda r=rank: band.at_mean(r) for rank in (1, 2)))
    band.until(0, lambda: bool(band.board.at_seq[1] and band.board.at_seq[2]))
    assert not any(band.board.row_valid)  # who lives and is not here is waited for
    band.results[0] = means.mean(Mean(vector_of(0, length), 1.0, None), first=True)
    assert company.end() == [0, 0]
    assert torch.equal(band.results[0], band.results[2])
    band.close()


def test_a_result_that_is_kept_is_not_overwritten() -> None:
    band = Band(HUGE, workers=1)
    memory = band.memory(0)
    means = SharedCollective().means(memory, 0, waiting(memory))
    for length in (LARGE, HUGE):
        kept = [means.mean(Mean(vector_of(0, length, number), 1.0, None), first=True) for number in range(6)]
        assert all(torch.equal(result, vector_of(0, length, number)) for number, result in enumerate(kept))
        kept.clear()
    places = {means.mean(Mean(vector_of(0, HUGE), 1.0, None), first=True).data_ptr() for _ in range(4)}
    assert len(places) == 1  # memory for a large one is used again
    band.close()


def test_what_is_refused() -> None:
    band = Band(5, workers=1)
    means = band.means(0)
    with pytest.raises(SchemeError, match="too large for the shared memory"):
        means.arrive(Mean(torch.zeros(4_000_000), 1.0, None), first=True)
    means.arrive(Mean(torch.zeros(5), 1.0, None), first=True)
    with pytest.raises(SchemeError, match="while its last one is open"):
        means.arrive(Mean(torch.zeros(5), 1.0, None), first=True)
    band.close()


def test_vectors_of_different_lengths_are_refused() -> None:
    band = Band(5, workers=2)
    band.means(1).arrive(Mean(torch.zeros(4), 1.0, None), first=True)
    with pytest.raises(SchemeError, match="different lengths"):
        band.means(0).mean(Mean(torch.zeros(5), 1.0, None), first=True)
    band.close()
