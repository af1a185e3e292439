"""Signals that ask this process to end, from its first line to its last.

    starting   loading torch takes seconds: one line, exit code 130, at once
    at work    a command is running: `Interrupted` is raised in the command
    a run      has processes: signals are counted, and its launcher acts on the count (see `Counter`)

This module loads nothing but the standard library: it is the first one that a command loads.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

# the third is what engines forward to all tasks, the fourth comes when a terminal closes
ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
EXIT_CODE = 130
Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None
_parting = ""
_terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]


class Interrupted(SystemExit):
    """A signal asked the command to end. It is no error, so `except Exception` does not catch it."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


class Counter:
    """A signal handler that only counts, because a signal may arrive anywhere in the code."""

    def __init__(self) -> None:
        self.count = 0
        self.hung_up = False  # the terminal is gone

    def __call__(self, number: int, _: object) -> None:
        self.count += 1
        self.hung_up = self.hung_up or number == signal.SIGHUP


def handled() -> Iterable[signal.Signals]:
    """The signals to handle: not SIGHUP if `nohup` ignores it."""
    return [number for number in ASKED if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]


def leave_at_once() -> None:
    """From now on a signal ends the process at once, after it has printed the text of `part_with`."""
    _install(_leave)


def part_with(text: str) -> None:
    """Set the text that a process prints when a signal ends it at once."""
    global _parting
    _parting = text


def raise_while_working() -> None:
    """From now on a signal raises `Interrupted`, so that `with` blocks close what is open."""
    part_with("interrupted\n")
    _install(_raise)


def count_from_now_on(counter: Counter) -> None:
    """Count signals until the process ends: after the run its result has to be printed."""
    _install(counter)


@contextmanager
def handling(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Handle signals inside; afterwards they do what they did before. Only the main thread can handle signals: in
    another one nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def counted(counter: Counter) -> AbstractContextManager[None]:
    """Count the signals that ask this process to end."""
    return handling(dict.fromkeys(handled(), counter))


@contextmanager
def deferred() -> Iterator[None]:
    """A Ctrl-C inside is raised afterwards. Libraries that are loading catch exceptions of any kind, and a Ctrl-C
    would be lost. Handlers that the program has installed itself are not replaced."""
    counter = Counter()
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with handling({signal.SIGINT: counter} if ours else {}):
        yield
    if counter.count:
        raise KeyboardInterrupt


def _install(handler: Handler) -> None:
    for number in handled():
        signal.signal(number, handler)


def _raise(number: int, _: object) -> None:
    if number == signal.SIGHUP:
        leave_terminal()
    leave_at_once()  # a second signal does not wait until this one has closed everything
    raise Interrupted


def _leave(*_: object) -> None:
    os.write(2, _parting.encode())
    os._exit(EXIT_CODE)


def ignore() -> None:
    """The command has ended: ignore signals until the process has."""
    _install(signal.SIG_IGN)


def leave_terminal() -> None:
    """The terminal has closed: further output is dropped, instead of failing."""
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in _terminals:
        os.dup2(null, descriptor)
    os.close(null)
