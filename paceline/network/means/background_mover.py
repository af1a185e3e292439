"""A thread that carries an exchange of a group on while its worker computes."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from typing import Protocol


class Moved(Protocol):
    """What the thread needs of a group."""

    @property
    def ring(self) -> Callable[[], None]:
        """Wake the worker."""

    def idle(self) -> bool:
        """Whether nothing is under way."""

    def attended(self) -> dict[int, tuple[int, Callable[[], None]]]:
        """By descriptor: the events to poll for, and what to do then."""

    def proceed(self) -> None:
        """Send what has become final."""


class BackgroundMover:
    """It sleeps while the worker attends to the connections itself, and ends with the group."""

    def __init__(self, group: Moved) -> None:
        self._group = group
        self._wanted, self._over = threading.Event(), False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._bell_lock = threading.Lock()
        threading.Thread(target=self._run, name="means", daemon=True).start()

    def begin(self) -> None:
        """The worker computes."""
        self._wanted.set()

    def rest(self) -> None:
        """The worker attends to the connections itself from now on."""
        self._wanted.clear()
        self.wake()

    def end(self) -> None:
        self._over = True
        self.wake()
        self._wanted.set()

    def wake(self) -> None:
        with self._bell_lock:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def _run(self) -> None:
        group = self._group
        while True:
            self._wanted.wait()
            while self._wanted.is_set() and not group.idle():
                self._move()
            if self._over:
                break
            if group.idle():
                self._wanted.clear()
                if self._over:  # it has ended in between
                    break
                group.ring()
        with self._bell_lock:
            os.close(self._bell)
            self._bell = -1

    def _move(self) -> None:
        """Wait for news of a connection, or of the vector, and do what can be done."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        connections = self._group.attended()
        for descriptor, (events, _) in connections.items():
            poll.register(descriptor, events)
        for descriptor, _ in poll.poll():
            if descriptor in connections:
                connections[descriptor][1]()
            else:
                os.eventfd_read(self._bell)
                self._group.proceed()
