"""How processes of one machine wait for each other, and wake each other: a pipe for each role."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterable, Sequence

from paceline.processes.memory.board import Board, fence
from paceline.processes.memory.spinning import BRIEF, Spinning

SOON = 50  # ms between two calls of `restless`


class Wakeup:
    """One pipe per role. A role that waits spins for a while, then sleeps until another role rings."""

    def __init__(self, board: Board, descriptors: Sequence[int], me: int, spinning: Spinning | None = None) -> None:
        self.board, self.descriptors, self.me = board, descriptors, me
        self.spinning = spinning or Spinning(0)
        self._poll = select.poll()
        self._own = descriptors[2 * me]
        self._poll.register(self._own, select.POLLIN)
        self._sources: dict[int, Callable[[], None]] = {}  # other descriptors to read, and their readers
        self.restless: Callable[[], bool] | None = None  # called while waiting; True: call it again soon
        self.before_sleep: Callable[[], None] | None = None  # called once, when spinning was not enough

    @staticmethod
    def create(roles: int) -> list[int]:
        """A pipe for each role. A write into a pipe tells the kernel that the writer is about to wait: the reader then
        runs on its core at once. An eventfd lacks that, and costs a millisecond when all cores are busy."""
        ends: list[int] = []
        try:
            for _ in range(roles):
                ends += os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            for end in ends:
                os.close(end)
            raise
        return ends

    def ring(self, place: int) -> None:
        """Wake a role, if it sleeps."""
        fence()
        if self.board.sleeping[place]:
            with contextlib.suppress(BlockingIOError):  # the pipe is full: the role will wake anyway
                os.write(self.descriptors[2 * place + 1], b"!")

    def ring_those(self, places: Iterable[int]) -> None:
        """Wake those of some roles that sleep."""
        fence()
        sleeping = self.board.sleeping.tolist()
        for place in places:
            if sleeping[place]:
                with contextlib.suppress(BlockingIOError):
                    os.write(self.descriptors[2 * place + 1], b"!")

    def ring_all(self) -> None:
        self.ring_those(range(self.board.roles))

    def wait(self, ready: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until `ready()`; gives its last answer, False after `seconds`."""
        if ready():
            return True
        spinning, clock = self.spinning, time.perf_counter_ns
        began = now = clock()
        deadline = None if seconds is None else began + int(seconds * 1e9)
        if not spinning.limit:
            return self._sleep(ready, deadline)
        until, sources = began + spinning.nanoseconds, self._sources
        if deadline is not None:
            until = min(until, deadline)
        while now < until:
            os.sched_yield()  # let another process have this core
            if sources:
                self._take_in(self._poll.poll(0))
            there, now = ready(), clock()
            if there:
                spinning.waited(now - began, now)
                return True
        there = self._sleep(ready, deadline)
        now = clock()
        spinning.waited(now - began, now)
        return there

    def glance(self, ready: Callable[[], bool]) -> bool:
        """Spin for a moment, where this role may spin at all: `ready()` may be about to be true."""
        spin, clock = min(self.spinning.nanoseconds, BRIEF), time.perf_counter_ns
        until = clock() + spin if spin else 0
        while spin and clock() < until:
            if ready():
                return True
            os.sched_yield()
        return False

    def _sleep(self, ready: Callable[[], bool], deadline: int | None) -> bool:
        """Sleep until `ready()`, or until a time in ns."""
        sleeping, me = self.board.sleeping, self.me
        if self.before_sleep is not None:
            prepare, self.before_sleep = self.before_sleep, None  # first: it may have to wait too
            prepare()
        try:
            while True:
                sleeping[me] = 1
                fence()
                soon = self.restless is not None and self.restless()  # before `ready`, which it may make true
                if ready():
                    return True
                left = None if deadline is None else (deadline - time.perf_counter_ns()) // 1_000_000 + 1
                if left is not None and left <= 0:
                    return False
                if soon:
                    left = SOON if left is None else min(left, SOON)
                self._take_in(self._poll.poll(left))
        finally:
            sleeping[me] = 0

    def attend(self, descriptor: int, take_in: Callable[[], None], events: int = select.POLLIN) -> None:
        """Call `take_in` when a descriptor is ready while this role waits."""
        self._sources[descriptor] = take_in
        self._poll.register(descriptor, events)

    def modify(self, descriptor: int, events: int) -> None:
        """Wait for other events of a descriptor."""
        if descriptor in self._sources:
            self._poll.modify(descriptor, events)

    def ignore(self, descriptor: int) -> None:
        if self._sources.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def look(self) -> None:
        """Read the descriptors that are ready, without waiting."""
        if self._sources:
            self._take_in(self._poll.poll(0))

    def _take_in(self, news: Iterable[tuple[int, int]]) -> None:
        for descriptor, _ in news:
            if descriptor == self._own:
                self.quiet()
            elif (take_in := self._sources.get(descriptor)) is not None:
                take_in()

    def quiet(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.descriptors[2 * self.me], 4096)
