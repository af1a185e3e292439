"""Makes items in a thread while the one before is in use."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")

_END: Any = object()
_STARTED: Any = object()


def made_ahead(items: Iterator[Item]) -> Generator[Item]:
    """The items. While one is in use, a thread makes the next. An error in the thread is raised where its item would
    have been given, with the traceback of the thread. The thread ends when this generator is closed."""
    thread = _Maker(items)
    thread.begin()
    try:
        while True:
            item, error = thread.made.get()
            if error is not None:
                raise error
            if item is _END:
                return
            thread.asked.put(True)
            yield item
    finally:
        thread.asked.put(False)
        thread.join()


class _Maker(threading.Thread):
    def __init__(self, items: Iterator[Any]) -> None:
        super().__init__(name="batches ahead", daemon=True)
        self._items = items
        self.asked: SimpleQueue[bool] = SimpleQueue()
        self.made: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def begin(self) -> None:
        """Start with one item. The operations of this thread use one core; torch gives a new thread as many as the
        process has set last, so the number of the calling thread is set once more."""
        before = torch.get_num_threads()
        self.asked.put(True)
        self.start()
        self.made.get()
        if torch.get_num_threads() != before or before > 1:
            torch.set_num_threads(before)

    def run(self) -> None:
        if torch.get_num_threads() > 1:
            torch.set_num_threads(1)
        self.made.put((_STARTED, None))
        while self.asked.get():
            try:
                with torch.no_grad():  # as in the training loop
                    item, error = next(self._items, _END), None
            except BaseException as raised:
                item, error = _END, raised
            self.made.put((item, error))
            if item is _END:
                return
            del item
