"""Exclusive times: every nanosecond is counted once, under the innermost category."""

from __future__ import annotations

import threading

import pytest
import torch

from paceline.processes.memory.board import TIMES, Board
from paceline.processes.roles.stopwatch import CATEGORIES, Category, Stopwatch

GRADIENT, UPDATE, WAIT, OTHER = Category.GRADIENT, Category.UPDATE, Category.WAIT, Category.OTHER


class Clock:
    """Nanoseconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000

    def __call__(self) -> int:
        return self.now

    def passes(self, ns: int) -> None:
        self.now += ns


class Timed:
    """A stopwatch with words and a clock of its own."""

    def __init__(self) -> None:
        self.clock, self.words = Clock(), [0] * TIMES
        self.watch = Stopwatch(self.words, self.clock)

    def spent(self) -> dict[str, int]:
        return {name: ns for name, ns in zip(CATEGORIES, self.words, strict=False) if ns}


def test_the_board_has_a_word_for_each_category() -> None:
    assert list(Category) == list(range(len(CATEGORIES)))
    assert len(CATEGORIES) <= TIMES
    board = Board.create(2, 1)
    board.times[2][OTHER] = 7
    assert [sum(words) for words in board.times] == [0, 0, 7]


def test_a_wait_inside_a_call_is_no_time_of_the_call() -> None:
    timed = Timed()
    passes = timed.clock.passes
    wait = timed.watch.timed(WAIT, lambda: passes(30))

    def call() -> str:
        passes(5)
        wait()
        passes(7)
        return "result"

    timed.watch.start(OTHER)
    passes(1)
    assert timed.watch.timed(UPDATE, call)() == "result"
    passes(2)
    timed.watch.stop()
    assert timed.spent() == {"update": 12, "wait": 30, "other": 3}


def test_the_times_are_there_before_it_stops_and_those_of_the_next_life_are_added() -> None:
    timed = Timed()
    compute = timed.watch.timed(GRADIENT, lambda: timed.clock.passes(10))
    timed.watch.start(OTHER)
    compute()
    assert timed.spent() == {"gradient": 10}  # a process that is killed here loses nothing
    after = Stopwatch(timed.words, timed.clock)
    timed.clock.passes(1000)  # between the two lives
    after.start(OTHER)
    after.timed(GRADIENT, lambda: timed.clock.passes(3))()
    after.stop()
    assert timed.spent() == {"gradient": 13}


def test_an_error_leaves_the_category() -> None:
    timed = Timed()

    def fail() -> None:
        timed.clock.passes(4)
        raise ArithmeticError

    timed.watch.start(OTHER)
    with pytest.raises(ArithmeticError):
        timed.watch.timed(UPDATE, fail)()
    timed.clock.passes(6)
    timed.watch.stop()
    assert timed.spent() == {"update": 4, "other": 6}


def test_nothing_is_counted_before_the_start_and_after_the_stop() -> None:
    timed = Timed()
    compute = timed.watch.timed(GRADIENT, lambda: timed.clock.passes(10))
    compute()
    timed.watch.start(OTHER)
    timed.watch.stop()
    compute()
    timed.watch.stop()
    assert timed.spent() == {}


def test_other_threads_are_not_counted() -> None:
    timed = Timed()
    compute = timed.watch.timed(GRADIENT, lambda: timed.clock.passes(10))
    timed.watch.start(OTHER)
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    timed.watch.stop()
    assert timed.spent() == {"other": 10}


def test_categories_are_ranges_of_a_trace_while_there_is_one() -> None:
    timed = Timed()
    compute = timed.watch.timed(GRADIENT, lambda: torch.ones(3).add_(1))
    timed.watch.start(OTHER)
    compute()
    with torch.autograd.profiler.profile() as trace:
        timed.watch.enter(UPDATE)
        timed.watch.begin_ranges()  # inside a category, which is none of the trace
        compute()
        timed.watch.leave()
        timed.watch.enter(WAIT)
        timed.watch.end_ranges()
        timed.watch.leave()
        compute()
    timed.watch.stop()
    found = [event.name for event in trace.function_events if event.name.startswith("paceline")]
    assert sorted(found) == ["paceline: gradient", "paceline: wait"]
