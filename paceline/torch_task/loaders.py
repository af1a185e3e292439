"""A DataLoader taken apart: its data set is read by index, in the order and by the processes that it asks for."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from paceline.errors import UsageError
from paceline.processes.parent_death import die_with_parent
from paceline.sampling import Indices, mixed
from paceline.torch_task.batch_parts import Parts
from paceline.torch_task.random_numbers import all_seeded
from paceline.torch_task.samples import Collate

Drawn = tuple[int, Indices]  # a seed and indices
Fetch = Callable[[Drawn], tuple[int, Parts]]

_OF_PROCESSES = ("timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor")


@dataclass(frozen=True)
class Loading:
    """What a DataLoader says of its data set. `sampler`: another order than shuffled or stored."""

    dataset: Any
    batch: int
    shuffle: bool
    drop_last: bool
    collate: Collate | None
    sampler: Any = None
    num_workers: int = 0
    processes: dict[str, Any] = field(default_factory=dict)  # settings of the processes that read ahead
    ignored: str | None = None


def taken_apart(loader: DataLoader[Any]) -> Loading | None:
    """What the loader says; None if it can only be gone through from its start."""
    sampler, batches = loader.sampler, loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset) or batches is None or type(batches) is not BatchSampler:
        return None
    if isinstance(sampler, DistributedSampler):
        raise UsageError(
            "the DataLoader has a DistributedSampler, which shards the data over the processes of torch.distributed; a "
            "task is sharded by feed=shard: give a DataLoader without the sampler, with shuffle= instead"
        )
    plain = type(sampler) is SequentialSampler
    shuffled = type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]
    if not (plain or shuffled) and not hasattr(sampler, "__len__"):
        return None
    ignored = "the DataLoader's generator is not used: the seed of the run decides the order"
    return Loading(
        loader.dataset,
        batches.batch_size,
        shuffled,
        batches.drop_last,
        None if loader.collate_fn is default_collate else loader.collate_fn,
        None if plain or shuffled else sampler,
        loader.num_workers,
        {name: getattr(loader, name) for name in _OF_PROCESSES if getattr(loader, name)} if loader.num_workers else {},
        ignored if loader.generator is not None else None,
    )


def order_of(sampler: Any, *key: int) -> Callable[[int], Indices]:
    """The order of the samples in each epoch, as the sampler gives it: a function of the key and the epoch."""

    def order(epoch: int) -> Indices:
        own, seed = copy.copy(sampler), mixed("sampler", *key, epoch)
        if getattr(own, "generator", None) is not None:
            own.generator = torch.Generator().manual_seed(seed)
        if hasattr(own, "set_epoch"):
            own.set_epoch(epoch)
        with all_seeded(seed):
            found = np.fromiter((int(one) for one in own), np.int64)
        if len(found) != len(sampler):
            raise UsageError(
                f"the sampler gives {len(found)} samples in epoch {epoch}, but its length is {len(sampler)}"
            )
        return found

    return order


def read_ahead(
    drawn: Iterator[Drawn], fetch: Fetch, num_workers: int, processes: dict[str, Any]
) -> Iterator[tuple[int, Parts]]:
    """The batches that `fetch` makes of seeds and indices, made ahead of time by other processes. These end when the
    iterator is closed, or with this process."""
    starts = _Starts(os.getpid(), processes.get("worker_init_fn"))
    loader = DataLoader(
        _Fetched(fetch),
        sampler=_Once(drawn),
        batch_size=None,
        num_workers=num_workers,
        collate_fn=_same,
        generator=torch.Generator(),  # or torch's own numbers would be drawn from
        **processes | {"worker_init_fn": starts},
    )
    yield from loader


class _Starts:
    """What a process does first that reads ahead."""

    def __init__(self, parent: int, then: Callable[[int], None] | None) -> None:
        self._parent, self._then = parent, then

    def __call__(self, number: int) -> None:
        die_with_parent(signal.SIGKILL, self._parent)
        if self._then is not None:
            self._then(number)


class _Fetched(Dataset[tuple[int, Parts]]):
    """Makes a batch of its seed and indices, in another process."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch

    def __getitem__(self, drawn: Any) -> tuple[int, Parts]:
        return self._fetch(drawn)


class _Once:
    def __init__(self, drawn: Iterator[Drawn]) -> None:
        self._drawn = drawn

    def __iter__(self) -> Iterator[Drawn]:
        return self._drawn


def _same(batch: Any) -> Any:
    return batch
