"""A script's data sharded over its workers, item by item: of anything that a loop can go through."""

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

_KEPT = (  # settings of a DataLoader that its shard has too
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers"),
)
_END: Any = object()


def own_items(loader: Loader, rank: int, workers: int, seed: int) -> Iterator[Any]:
    """A worker's items, epoch after epoch: item i of an epoch belongs to worker i % workers.

    Loaders that shuffle by torch's random numbers shuffle alike on all workers, so that each item of an epoch belongs
    to one worker. Ends only with data that can be read once.
    """
    source, step = _sharded(loader, rank, workers)
    for epoch in count():
        with seeded(mixed(seed, "share", epoch)):  # an order is drawn no later than with the first item
            items = _iterator(source)
            first = next(items, _END)
        if first is _END and epoch == 0:
            raise UsageError("the loader is empty: it gives no item to train on")
        if first is _END:
            return
        mine = _END
        for mine in islice(chain([first], items), rank if step > 1 else 0, None, step):
            yield mine
        if items is source:  # an iterator has no second epoch
            return
        if mine is _END:
            raise UsageError(f"the loader gives worker {rank} nothing: fewer items in an epoch than {workers} workers")


def size_of(item: Any) -> int:
    """The number of samples of an item: the length of its first tensor."""
    first = next(_tensors(item), None)
    return len(first) if first is not None and first.dim() else 1


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, Mapping | tuple | list):
        for value in item.values() if isinstance(item, Mapping) else item:
            yield from _tensors(value)


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
