"""A script's data cut among its workers: whatever can be looped over, item by item."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, count, islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from paceline.errors import UsageError
from paceline.sampling import mixed
from paceline.torch_task import seeded

Loader = Iterable[Any] | Callable[[], Iterable[Any]]

_END: Any = object()


def own_items(loader: Loader, rank: int, workers: int, seed: int) -> Iterator[Any]:
    """A worker's items, epoch after epoch: item i of an epoch is worker i % workers's.

    Loaders that shuffle by torch's random numbers shuffle alike on all workers, so that every item of an epoch is one
    worker's. Ends only with data that can be gone through once.
    """
    source, step = _cut(loader, rank, workers)
    for epoch in count():
        with seeded(mixed(seed, "share", epoch)):  # an order is drawn no later than with the first item
            items = _iterator(source)
            first = next(items, _END)
        if first is _END and epoch == 0:
            raise UsageError("the loader is empty: it gives not one item to train on")
        if first is _END:
            return
        mine = _END
        for mine in islice(chain([first], items), rank if step > 1 else 0, None, step):
            yield mine
        if items is source:  # no second epoch
            return
        if mine is _END:
            raise UsageError(f"the loader gives worker {rank} nothing: fewer items in an epoch than {workers} workers")


def size_of(item: Any) -> int:
    """How many samples an item holds: as many as its first tensor is long."""
    first = next(_tensors(item), None)
    return len(first) if first is not None and first.dim() else 1


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, Mapping):
        for value in item.values():
            yield from _tensors(value)
    elif isinstance(item, tuple | list):
        for value in item:
            yield from _tensors(value)


def _iterator(source: Loader) -> Iterator[Any]:
    try:
        return iter(source() if callable(source) else source)
    except TypeError as error:
        raise UsageError(
            f"share() takes what a loop can go through (a DataLoader, a list, a function that gives an iterator), "
            f"not a {type(source).__name__}: {error}"
        ) from error


def _cut(loader: Loader, rank: int, workers: int) -> tuple[Loader, int]:
    """What to go through, and which of its items to take: every so many-th."""
    if type(loader) is not DataLoader or workers == 1:
        return loader, workers
    if loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
        return loader, workers
    # the samples of the others need not even be read
    if hasattr(loader.batch_sampler, "__len__") and 0 < len(loader) < workers:
        raise UsageError(f"the loader gives {len(loader)} batches in an epoch, too few for {workers} workers")
    return DataLoader(
        loader.dataset,
        batch_sampler=_Own(loader.batch_sampler, rank, workers),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    ), 1


class _Own:
    """A worker's part of the batches that a sampler gives."""

    def __init__(self, batches: Iterable[list[int]], rank: int, workers: int) -> None:
        self._batches, self._rank, self._workers = batches, rank, workers

    def __iter__(self) -> Iterator[list[int]]:
        return islice(self._batches, self._rank, None, self._workers)
