"""Data that are read from their start: an IterableDataset (of samples), or a loader (of batches).

Batch number k is found by reading what comes before it. A source with `state_dict` and `load_state_dict`, such as
torchdata's StatefulDataLoader, is read from the nearest state that was kept instead.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, default_collate

from paceline.errors import UsageError
from paceline.fields import Feed
from paceline.runs import atomic_files
from paceline.sampling import mixed, portion
from paceline.torch_task.batch_parts import Parts, cut, parts_of, size_of
from paceline.torch_task.random_numbers import all_seeded
from paceline.torch_task.samples import Collate

EVERY = 32  # batches between two states that are kept
KEPT = 64  # newest states of a worker
_END: Any = object()


class Read(NamedTuple):
    """A batch of a worker, and the weight of its gradient."""

    parts: Parts
    size: int
    weight: float


class StreamSamples:
    """Data that are read from their start, by every worker: item i of an epoch belongs to worker i % workers; under
    `slice` all workers read the same batches, and each takes its part."""

    tensors = None

    def __init__(self, source: Any, what: str, collate: Collate | None = None) -> None:
        if iter_is_itself(source):
            raise UsageError(
                f"{what} is an iterator, which can be read only once and by one worker: give a function that returns it"
            )
        self.batched = not isinstance(source, IterableDataset)
        if self.batched and collate is not None and what == "train":
            raise UsageError(f"the {what} loader gives whole batches: give it the collate function, and omit collate")
        self.source, self._what, self._collate = source, what, collate or default_collate
        self._most: int | None = None  # samples that are evaluated
        self.length = _length(source)

    def first(self, number: int) -> StreamSamples:
        """The first `number` of these samples."""
        fewer = copy.copy(self)
        fewer._most = number
        return fewer

    def check(self, feed: Feed) -> None:
        if feed == "shared":
            raise UsageError(
                "data that are read from their start have one order: with feed=shared all workers would train on the "
                "same samples; use feed=shard, or slice"
            )

    def batches(
        self, batch: int, feed: Feed, rank: int, workers: int, seed: int, first: int, states: States
    ) -> Iterator[Read]:
        """A worker's batches from number `first` on. The first epoch without an item of this worker ends them."""
        self.check(feed)
        step, mine = (workers, rank) if feed == "shard" else (1, 0)
        reader = _Reader(self.source, seed, step, mine)
        number = states.restore(reader, first)
        for _ in range((first - number) * (1 if self.batched else batch)):
            if reader.next() is _END:
                return
        number = first
        while True:
            if self.batched:
                item = reader.next()
                if item is _END:
                    return
                parts = parts_of(item)
            else:
                samples = [reader.next() for _ in range(batch)]
                if samples[-1] is _END:
                    return
                parts = parts_of(self._collate(samples))
            whole = size_of(parts)
            begin, size, weight = portion(whole, feed, rank, workers)
            yield Read(parts if size == whole else cut(parts, begin, begin + size), size, weight)
            number += 1
            states.keep(reader, number)

    def chunks(self, size: int) -> Iterator[tuple[Parts, int]]:
        """All samples of an epoch in their order, and the number of each chunk."""
        left = float("inf") if self._most is None else self._most
        source = _fresh(self.source)
        items = iter(source() if callable(source) else source)
        while left > 0:
            taken: list[Any] = []
            for item in items:
                taken.append(item)
                if self.batched or len(taken) >= min(size, left):
                    break
            if not taken:
                return
            parts = parts_of(taken[0] if self.batched else self._collate(taken))
            number = size_of(parts)
            if number > left:
                number = int(left)
                parts = cut(parts, 0, number)
            left -= number
            yield parts, number


class States:
    """Keeps the states of a worker's source in files of the run directory. They only save time: without them the source
    is read from its start, to the same batches."""

    def __init__(self, directory: Path | None, rank: int) -> None:
        self._folder = None if directory is None else directory / "data"
        self._rank = rank

    def restore(self, reader: _Reader, first: int) -> int:
        """Set the reader to the newest state at or before batch `first`; gives its number, 0 without one."""
        if self._folder is None or not reader.stateful:
            return 0
        for number in sorted((one for one in self._numbers() if one <= first), reverse=True):
            with suppress(OSError, ValueError, KeyError, TypeError):  # damaged: an earlier one does
                kept = json.loads(self._path(number).read_text())
                reader.restore(kept["epoch"], kept["index"], kept["state"])
                return number
        return 0

    def keep(self, reader: _Reader, number: int) -> None:
        if number % EVERY or self._folder is None or not reader.stateful:
            return
        kept = {"epoch": reader.epoch, "index": reader.index, "state": reader.source.state_dict()}
        with suppress(TypeError, ValueError, OSError):  # a state that JSON cannot hold, a full disk
            text = json.dumps(kept)
            if json.loads(text) == kept:
                self._folder.mkdir(exist_ok=True)
                atomic_files.write_bytes(self._path(number), text.encode(), durable=False)
        for old in sorted(self._numbers())[:-KEPT]:
            self._path(old).unlink(missing_ok=True)

    def _numbers(self) -> list[int]:
        assert self._folder is not None
        return [int(one.stem.rpartition("-")[2]) for one in self._folder.glob(f"worker-{self._rank}-*.json")]

    def _path(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"worker-{self._rank}-{number}.json"


class _Reader:
    """Goes through a source, epoch after epoch, and gives every `step`-th item of each, from `mine` on."""

    def __init__(self, source: Any, seed: int, step: int, mine: int) -> None:
        self.source = _fresh(source)
        self.stateful = hasattr(self.source, "state_dict") and hasattr(self.source, "load_state_dict")
        self._seed, self._step, self._mine = seed, step, mine
        self.epoch = self.index = 0  # of the next item that is read
        self._items: Iterator[Any] | None = None

    def restore(self, epoch: int, index: int, state: Any) -> None:
        self.source.load_state_dict(state)
        self.epoch, self.index, self._items = epoch, index, None

    def next(self) -> Any:
        """The next item of this worker; _END if an epoch has none."""
        while True:
            item, mine = self._read(), self.index % self._step == self._mine
            if item is _END:
                if self.index <= self._mine:
                    return _END
                self.epoch, self.index, self._items = self.epoch + 1, 0, None
                continue
            self.index += 1
            if mine:
                return item

    def _read(self) -> Any:
        """An item, drawn from random numbers of its own: the same whatever was read before it."""
        with all_seeded(mixed("stream", self._seed, self.epoch, self.index)):
            if self._items is None:
                self._items = iter(self.source() if callable(self.source) else self.source)
            return next(self._items, _END)


def is_stream(data: Any) -> bool:
    """Whether data can only be read from their start."""
    if isinstance(data, IterableDataset) or iter_is_itself(data):
        return True
    return not hasattr(data, "__getitem__") and (hasattr(data, "__iter__") or callable(data))


def iter_is_itself(data: Any) -> bool:
    return hasattr(data, "__next__")


def _fresh(source: Any) -> Any:
    """A source whose position is its own: workers of one process do not move each other's."""
    if callable(source):
        return source
    try:
        return copy.deepcopy(source)
    except Exception:  # open files, locks: whatever the user's object holds
        return source


def _length(source: Any) -> int | None:
    """The samples of an epoch, where the source knows them."""
    data = getattr(source, "dataset", source)
    if data is source and not isinstance(source, IterableDataset):
        return None  # its length would be that of batches
    try:
        return len(data)
    except TypeError:
        return None
