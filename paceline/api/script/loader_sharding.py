"""A script's data sharded over its workers, item by item: of anything that a loop can go through."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from itertools import chain, islice
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from paceline.errors import UsageError
from paceline.sampling import mixed
from paceline.torch_task import seeded
from paceline.torch_task.random_numbers import Seeding

Loader = Iterable[Any] | Callable[[], Iterable[Any]]

_KEPT = (  # settings of a DataLoader that its shard has too
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers"),
)
_END: Any = object()


class Shard:
    """A worker's items, epoch after epoch: item i of an epoch belongs to worker i % workers.

    Loaders that shuffle by torch's random numbers shuffle alike on all workers, so that each item of an epoch belongs
    to one worker. A single worker goes through its loader as the script itself would, with the script's random numbers.
    Ends only with data that can be read once.
    """

    def __init__(self, loader: Loader, rank: int, workers: int, seed: int, seeding: Seeding = seeded) -> None:
        """`seeding`: seeds the random numbers that orders are drawn from."""
        self._rank, self._workers, self._seed, self._seeding = rank, workers, seed, seeding
        self.epoch = 0  # of the last item
        self._begun = 0
        self.note = ""  # what the user should know of how the data are sharded
        self._own = _distributed_sampler(loader)
        if self._own is not None:
            self.note = _use(self._own, rank, workers)
        if self._own is not None and self._own.num_replicas == workers:
            self._source, self._step = loader, 1
        else:
            self._source, self._step = _sharded(loader, rank, workers)
        self.loader = loader

    def __len__(self) -> int:
        whole = len(self.loader)  # type: ignore[arg-type]  # TypeError by Python, for what has no length
        if self._own is not None and self._own.num_replicas == self._workers:
            return whole
        return len(range(self._rank, whole, self._workers))

    def items(self, epochs: int | None = None) -> Iterator[Any]:
        """The items of the next epochs; of all to come by default."""
        rank, workers = self._rank, self._workers
        last = math.inf if epochs is None else self._begun + epochs
        while self._begun < last:
            self.epoch, self._begun = self._begun, self._begun + 1
            if self._own is not None:
                self._own.set_epoch(self.epoch)
            # an order is drawn no later than with the first item
            with self._seeding(mixed(self._seed, "share", self.epoch)) if workers > 1 else nullcontext():
                items = _iterator(self._source)
                first = next(items, _END)
            if first is _END and self.epoch == 0:
                raise UsageError("the loader is empty: it gives no item to train on")
            if first is _END:
                return
            mine = _END
            for mine in islice(chain([first], items), rank if self._step > 1 else 0, None, self._step):
                yield mine
            if items is self._source:  # an iterator has no second epoch
                return
            if mine is _END:
                raise UsageError(
                    f"the loader gives worker {rank} nothing: fewer items in an epoch than {workers} workers"
                )


def _distributed_sampler(loader: Loader) -> DistributedSampler[Any] | None:
    batches = getattr(loader, "batch_sampler", None)
    found = [one for one in (getattr(batches, "sampler", None), getattr(loader, "sampler", None)) if one is not None]
    return next((one for one in found if isinstance(one, DistributedSampler)), None)


def _use(sampler: DistributedSampler[Any], rank: int, workers: int) -> str:
    """What is said about a DistributedSampler; UsageError if it shards for other workers than those of the run."""
    if (sampler.num_replicas, sampler.rank) == (workers, rank):
        return "the loader's DistributedSampler shards the data; share() sets its epoch"
    if sampler.num_replicas == 1:
        return "the loader's DistributedSampler is of one process: share() shards what it gives, and sets its epoch"
    raise UsageError(
        f"the loader has a DistributedSampler for process {sampler.rank} of {sampler.num_replicas}, and this is worker "
        f"{rank} of {workers}: its data would be sharded twice. Remove the sampler (share() shards the data), or make "
        "it with num_replicas=pace.workers, rank=pace.rank"
    )


def work_of(loader: Loader) -> tuple[int, int]:
    """The samples of a batch, and those of an epoch; UsageError for a loader that does not tell."""
    if isinstance(loader, DataLoader) and loader.batch_size is not None and isinstance(loader.sampler, Sized):
        batch, samples = loader.batch_size, len(loader.sampler)
        own = _distributed_sampler(loader)
        samples *= 1 if own is None else own.num_replicas
        return batch, samples - samples % batch if loader.drop_last else samples
    if isinstance(loader, Sequence) and loader:
        sizes = [samples_in(item) for item in loader]
        return max(sizes), sum(sizes)
    raise UsageError(
        f"samples and epochs need a loader with a length and a batch size (a DataLoader, or a list of batches), not a "
        f"{type(loader).__name__}; give steps"
    )


def samples_in(item: Any) -> int:
    """The number of samples: the length of the first tensor or array, of whatever library."""
    return next(_lengths(item), 1)


def _lengths(item: Any) -> Iterator[int]:
    shape = getattr(item, "shape", None)
    if shape is not None:
        if len(shape):
            yield int(shape[0])
    elif isinstance(item, Mapping | tuple | list):
        for part in item.values() if isinstance(item, Mapping) else item:
            yield from _lengths(part)


def _iterator(source: Loader) -> Iterator[Any]:
    try:
        return iter(source() if callable(source) else source)
    except TypeError as error:
        raise UsageError(
            f"share() takes what a loop can go through (a DataLoader, a list, a function that gives an iterator), "
            f"not a {type(source).__name__}: {error}"
        ) from error


def _sharded(loader: Loader, rank: int, workers: int) -> tuple[Loader, int]:
    """The loader to read, and the step between two items to take from it."""
    if type(loader) is not DataLoader or workers == 1:
        return loader, workers
    if loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
        return loader, workers
    # by batches, so that samples of the other workers are not read
    if hasattr(loader.batch_sampler, "__len__") and 0 < len(loader) < workers:
        raise UsageError(f"the loader gives {len(loader)} batches in an epoch, too few for {workers} workers")
    settings = {name: getattr(loader, name) for name in _KEPT}
    return DataLoader(loader.dataset, batch_sampler=_Own(loader.batch_sampler, rank, workers), **settings), 1


class _Own:
    """A worker's shard of the batches that a sampler gives."""

    def __init__(self, batches: Iterable[list[int]], rank: int, workers: int) -> None:
        self._batches, self._rank, self._workers = batches, rank, workers

    def __iter__(self) -> Iterator[list[int]]:
        return islice(self._batches, self._rank, None, self._workers)
