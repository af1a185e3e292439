"""The data of a task: samples that have an index, or a source that is read from its start, and a worker's batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, Self

from torch.utils.data import DataLoader

from paceline.errors import UsageError
from paceline.fields import Feed
from paceline.sampling import Stream, sample_seed
from paceline.task import Batch, Task
from paceline.torch_task import loaders
from paceline.torch_task.batch_parts import Parts
from paceline.torch_task.drawn_batches import drawn_batches
from paceline.torch_task.random_numbers import seeded
from paceline.torch_task.samples import Collate, Samples
from paceline.torch_task.streams import States, StreamSamples, is_stream

EVALUATION_CHUNK = 500  # samples per forward pass of an evaluation: fast, and small enough for any memory


class SampledTask(Task):
    """A task whose batches are drawn from data: which samples are in batch n of a worker does not depend on the
    framework that computes with them."""

    prepare: Callable[..., Any] | None = None
    answers = 1  # the last parts of a batch, which are no inputs of the model: the target (and the samples' weights)

    def _take_data(
        self,
        train: Any,
        test: Any,
        collate: Collate | None,
        batch: int | None,
        shuffle: bool | None,
        num_workers: int | None,
    ) -> None:
        self.sampler: Any = None
        self.drop_last, self.num_workers, self._processes = False, num_workers or 0, {}
        self.batch, self.shuffle = 32 if batch is None else batch, True if shuffle is None else shuffle
        loading = loaders.taken_apart(train) if isinstance(train, DataLoader) else None
        if loading is not None:
            for what, given, own in (("batch", batch, loading.batch), ("shuffle", shuffle, loading.shuffle)):
                if given not in (None, own):
                    raise UsageError(f"{what}={given} contradicts the DataLoader's {own}; omit it")
            self.batch, self.shuffle, self.sampler = loading.batch, loading.shuffle, loading.sampler
            self.drop_last, self._processes = loading.drop_last, loading.processes
            self.num_workers = loading.num_workers if num_workers is None else num_workers
            self.notice = self.notice or loading.ignored
        self.train = _data_of(train, "train", collate)
        if isinstance(self.train, StreamSamples):
            self._check_stream(batch, shuffle, num_workers)
            self.shuffle = False
            if self.train.batched:  # 0: not known; where there is no batch_size, `batch` says it
                self.batch = getattr(self.train.source, "batch_size", None) or batch or 0
            if test is None and self.train.length is None:
                raise UsageError("train has no length, so it cannot be evaluated as a whole: give test data")
        self.test = self.train if test is None else _data_of(test, "test", collate)
        self.epoch_size = self.train.length if self.sampler is None else len(self.sampler)

    def _check_stream(self, batch: int | None, shuffle: bool | None, num_workers: int | None) -> None:
        assert isinstance(self.train, StreamSamples)
        if shuffle:
            raise UsageError(
                "train is read from its start, in its own order: shuffle inside the data, and omit shuffle"
            )
        if num_workers:
            raise UsageError("train is read from its start: give num_workers to a DataLoader around it")
        size = getattr(self.train.source, "batch_size", None)
        if self.train.batched and batch is not None and size not in (None, batch):
            raise UsageError(f"train gives whole batches, of {size}: the loader decides their size; omit batch")

    def _check_feed(self) -> None:
        if isinstance(self.train, StreamSamples):
            self.train.check(self.feed)

    def configured(self, *, batch: int | None = None, feed: Feed | None = None, shuffle: bool | None = None) -> Self:
        if isinstance(self.train, StreamSamples):
            self._check_stream(batch, shuffle, None)
        if shuffle is not None and self.sampler is not None:
            raise UsageError("the DataLoader's sampler decides the order; omit shuffle")
        other = super().configured(batch=batch, feed=feed, shuffle=shuffle)
        other._check_feed()
        return other

    def limited(self, samples: int) -> Self:
        if samples < 1:
            raise UsageError(f"at least 1 test sample must be taken, not {samples}")
        other = copy.copy(self)
        other.test = self.test.first(samples)
        return other

    def stream(self, rank: int, workers: int, seed: int) -> Stream:
        """Which samples are in which batch of a worker."""
        if isinstance(self.train, StreamSamples) or self.epoch_size is None:
            raise UsageError(f"the data of task {self.name!r} are read from their start: their samples have no number")
        order = None
        if self.sampler is not None:  # workers with a common order draw it from the same numbers
            order = loaders.order_of(self.sampler, seed, rank if self.feed == "shared" else 0)
        settings = (self.epoch_size, self.batch, self.feed, self.shuffle, rank, workers, seed)
        return Stream(*settings, drop_last=self.drop_last, order=order)

    def batches(self, rank: int, workers: int, seed: int, first: int = 0) -> Iterator[Batch]:
        if isinstance(self.train, StreamSamples):
            return self._read(rank, workers, seed, first, States(None, rank))
        return drawn_batches(self, rank, workers, seed, first)

    def prefetched(
        self, rank: int, workers: int, seed: int, first: int = 0, directory: Path | None = None, *, thread: bool = False
    ) -> Iterator[Batch]:
        if isinstance(self.train, StreamSamples):
            return self._read(rank, workers, seed, first, States(directory, rank))
        number = self.num_workers
        return drawn_batches(self, rank, workers, seed, first, alone=True, thread=thread, num_workers=number)

    def threaded(self, *place: Any) -> Iterator[Batch]:
        return self.prefetched(*place, thread=True)

    def _read(self, rank: int, workers: int, seed: int, first: int, states: States) -> Iterator[Batch]:
        assert isinstance(self.train, StreamSamples)
        read = self.train.batches(self.batch, self.feed, rank, workers, seed, first, states)
        for number, one in zip(count(first), read, strict=False):
            own = sample_seed(seed, rank, number)
            with seeded(own ^ 1):
                parts = self._prepared(one.parts)
            yield Batch(parts, one.size, own, one.weight)

    def _cast_parts(self, parts: Parts) -> Parts:
        """The parts that the model and the loss take, on the CPU."""
        if self.prepare is None:
            return parts
        made = self.prepare(*parts)
        return (made,) if isinstance(made, dict) else tuple(made)

    def _pinned(self, parts: Parts) -> Parts:
        """The parts in memory from which the device where the task computes copies while it computes."""
        return parts

    def _placed(self, parts: Parts) -> Parts:
        """The parts where the task computes."""
        return parts

    def _prepared(self, parts: Parts) -> Parts:
        return self._placed(self._cast_parts(parts))


def _data_of(data: Any, what: str, collate: Collate | None) -> Samples | StreamSamples:
    if isinstance(data, DataLoader):
        loading = loaders.taken_apart(data)
        if loading is None:
            return StreamSamples(data, what, collate)
        if collate is not None and loading.collate is not None and what == "train":
            raise UsageError(f"the {what} DataLoader has a collate function of its own; omit collate")
        return Samples(loading.dataset, what, loading.collate or collate)
    if is_stream(data):
        return StreamSamples(data, what, collate)
    return Samples(data, what, collate)
