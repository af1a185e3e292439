"""Signals that ask this process to end, from its first line to its last.

    starting   loading torch takes seconds: one line, exit code 130, at once
    at work    a command is running: `Interrupted` is raised where the command stands
    a run      has processes: signals are counted, and its launcher acts on the count (see `Counter`)

This module loads nothing but the standard library: it is the first one that a command loads.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

# the third is what engines forward to all tasks, the fourth comes when a terminal closes
ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
EXIT_CODE = 130
_parting = ""
_terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]


class Interrupted(SystemExit):
    """A command was asked to end. No part of it may take this for an error of its own."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


class Counter:
    """A signal handler that only counts: the signal may have come in the middle of anything."""

    def __init__(self) -> None:
        self.count = 0
        self.hung_up = False  # the terminal is gone

    def __call__(self, number: int, _: object) -> None:
        self.count += 1
        self.hung_up = self.hung_up or number == signal.SIGHUP


def handled() -> Iterable[signal.Signals]:
    """The signals to handle. `nohup` has SIGHUP ignored, and it stays ignored."""
    return [number for number in ASKED if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]


def leave_at_once() -> None:
    """From now on a signal ends the process: there is nothing to put in order. It says the parting words."""
    _install(_leave)


def part_with(text: str) -> None:
    """The words of a process that a signal ends at once, before the command itself could say anything."""
    global _parting
    _parting = text


def raise_while_working() -> None:
    """From now on a signal raises `Interrupted`; what is open is closed on its way out."""
    part_with("interrupted\n")
    _install(_raise)


def count_from_now_on(counter: Counter) -> None:
    """Until the process ends: its run may be over, but what it has reached is yet to be told."""
    _install(counter)


@contextmanager
def counted(counter: Counter) -> Iterator[None]:
    """Count inside; afterwards signals do what they did before."""
    before = {number: signal.getsignal(number) for number in handled()}
    _install(counter)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deferred() -> Iterator[None]:
    """A Ctrl-C that comes inside is raised afterwards. Libraries that are loading catch exceptions of any kind, and the
    Ctrl-C would be lost with them. Handlers that the program has installed itself are left alone."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    counter = Counter()
    signal.signal(signal.SIGINT, counter)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if counter.count:
        raise KeyboardInterrupt


def _install(handler: Callable[[int, object], None]) -> None:
    for number in handled():
        signal.signal(number, handler)


def _raise(number: int, _: object) -> None:
    if number == signal.SIGHUP:
        leave_terminal()
    leave_at_once()  # a second signal does not wait for what this one has yet to close
    raise Interrupted


def _leave(*_: object) -> None:
    os.write(2, _parting.encode())
    os._exit(EXIT_CODE)


def ignore() -> None:
    """The command has ended: nothing may come between it and the end of the process."""
    for number in handled():
        signal.signal(number, signal.SIG_IGN)


def leave_terminal() -> None:
    """The terminal has closed: what is still said goes nowhere, and is no reason to fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in _terminals:
        os.dup2(null, descriptor)
    os.close(null)
