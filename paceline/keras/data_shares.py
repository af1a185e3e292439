"""A worker's share of the data of `model.fit`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from paceline.errors import UsageError
from paceline.processes.roles import script_role


def place() -> tuple[int, int]:
    """This worker's rank, and the number of workers; before attach() too."""
    role = script_role.role()
    return (0, 1) if role is None else (role.rank, role.memory.plan.workers)


def share(*data: Any) -> Any:
    """This worker's share of the data, for `model.fit`: every worker calls it and gets other samples.

        x, y = paceline.keras.share(x, y)         # arrays: samples rank, rank + workers, …
        dataset = paceline.keras.share(dataset)   # a tf.data.Dataset or a PyDataset: item i is of worker i % workers

    Several arguments give a tuple. A `tf.data.Dataset` that shuffles needs a seed of its own (`shuffle(1000, seed=0)`):
    otherwise each worker shards another order.
    """
    if not data:
        raise UsageError("paceline.keras.share() was given no data: share(x, y), or share(dataset)")
    rank, workers = place()
    shares = tuple(one if workers == 1 else _share(one, rank, workers) for one in data)
    return shares[0] if len(shares) == 1 else shares


def _share(data: Any, rank: int, workers: int) -> Any:
    if isinstance(data, keras.utils.PyDataset):
        return _SharedItems(data, rank, workers)
    if hasattr(data, "shard") and hasattr(data, "element_spec"):  # a tf.data.Dataset
        return data.shard(workers, rank)
    if isinstance(data, dict):
        return {name: _share(one, rank, workers) for name, one in data.items()}
    if type(data) in (tuple, list) and all(hasattr(one, "shape") for one in data):
        return type(data)(_share(one, rank, workers) for one in data)
    if len(getattr(data, "shape", ())):
        if len(data) < workers:
            raise UsageError(f"the data have {len(data)} samples, too few for {workers} workers")
        return data[rank::workers]
    raise UsageError(
        f"paceline.keras.share() takes arrays, a tf.data.Dataset or a PyDataset, not a {type(data).__name__}: take "
        "this worker's part yourself, by pace.rank and pace.workers"
    )


class _SharedItems(keras.utils.PyDataset):  # type: ignore[misc]
    """Every `workers`-th batch of a PyDataset."""

    def __init__(self, data: Any, rank: int, workers: int) -> None:
        super().__init__(
            workers=data.workers, use_multiprocessing=data.use_multiprocessing, max_queue_size=data.max_queue_size
        )
        if data.num_batches is None:
            raise UsageError("paceline.keras.share() needs to know how many batches the PyDataset has: __len__")
        self._data, self._numbers = data, np.arange(rank, data.num_batches, workers)
        if not len(self._numbers):
            raise UsageError(f"the PyDataset has {data.num_batches} batches, too few for {workers} workers")

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        return self._data[int(self._numbers[index])]

    def on_epoch_begin(self) -> None:
        """Of the whole data set."""
        self._data.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Of the whole data set."""
        self._data.on_epoch_end()
