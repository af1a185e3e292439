"""Where a role's time goes: a stopwatch with a stack of categories, so that no time is counted twice.

A wait inside a call is time of the wait, not of the call. The times are words of the board: they survive the process,
and those of its next life are added to them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, MutableSequence
from enum import IntEnum
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
Words = MutableSequence[int] | memoryview


class Category(IntEnum):
    """What a role spends time on; the numbers are those of its words on the board."""

    GRADIENT = 0  # the task's gradients; of a script its own loop
    DATA = 1  # mini-batches
    UPDATE = 2  # the scheme's own code: its step, its server methods, its rules
    COPY = 3  # moving vectors to and from other processes: calls and means, without what else is here
    WAIT = 4  # for other processes
    SIGNAL = 5  # waking other processes
    HOOKS = 6
    RECORD = 7  # the order log
    CHECKPOINT = 8
    OTHER = 9
    TRACE = 10  # torch.profiler's own time


CATEGORIES = tuple(one.name.lower() for one in Category)


class Stopwatch:
    """Adds the time of one thread to words, in ns. `clock` gives ns."""

    def __init__(self, words: Words, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._words, self._clock = words, clock
        self._stack: list[Category] = []  # empty: it does not run
        self._since = 0
        self._thread = 0
        self._ranges: list[Any] | None = None  # of torch.profiler, one for each category on the stack; None: no trace

    def start(self, base: Category) -> None:
        """Begin. `base`: what time is spent on outside of all other categories."""
        self._stack, self._since, self._thread = [base], self._clock(), threading.get_ident()

    def stop(self) -> None:
        while self._stack:
            self.leave()

    def enter(self, category: Category) -> None:
        now = self._clock()
        self._words[self._stack[-1]] += now - self._since
        self._since = now
        self._stack.append(category)
        if self._ranges is not None:
            self._ranges.append(_opened(category))

    def leave(self) -> None:
        if self._ranges:
            _close(self._ranges.pop())
        now = self._clock()
        self._words[self._stack.pop()] += now - self._since
        self._since = now

    def running(self) -> bool:
        """Whether the time of this thread is measured. Other threads of the process are not: they work beside it."""
        return bool(self._stack) and threading.get_ident() == self._thread

    def timed(self, category: Category, function: Callable[P, R]) -> Callable[P, R]:
        """The function, with its time counted under a category while the stopwatch runs."""

        @wraps(function)
        def measured(*args: P.args, **kwargs: P.kwargs) -> R:
            if not self.running():
                return function(*args, **kwargs)
            self.enter(category)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return measured

    def begin_ranges(self) -> None:
        """From now on every category is a range of torch.profiler's trace too."""
        self._ranges = [None] * len(self._stack)

    def end_ranges(self) -> None:
        for one in reversed(self._ranges or []):
            _close(one)
        self._ranges = None


def _opened(category: Category) -> Any:
    opened = torch.profiler.record_function(f"paceline: {CATEGORIES[category]}")
    opened.__enter__()  # type: ignore[no-untyped-call]
    return opened


def _close(opened: Any) -> None:
    if opened is not None:
        opened.__exit__(None, None, None)
