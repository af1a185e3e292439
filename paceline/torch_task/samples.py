"""Samples by index: tensors, numpy arrays (in memory or mapped files), dictionaries of them, map-style data sets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from paceline.errors import UsageError
from paceline.sampling import Indices
from paceline.torch_task.batch_parts import Parts, parts_of
from paceline.torch_task.tokens import Tokens

Collate = Callable[[list[Any]], Any]

# numpy's types that torch can hardly compute with, and what their numbers become
WIDER = {"uint16": np.int64, "uint32": np.int64, "uint64": np.int64}
ALIGNED = 64  # bytes: where torch puts a tensor of its own


class MapDataset(Protocol):
    """Torch's map-style data set: a length, and samples by index."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Samples:
    """Samples by index. `tensors`: the columns, where all of them are tensors in memory."""

    def __init__(self, data: Any, what: str, collate: Collate | None = None) -> None:
        if isinstance(data, TensorDataset):
            data = data.tensors
        self.tensors: tuple[Tensor, ...] | None = None
        self._columns: tuple[Tensor | np.ndarray, ...] | None = None
        self.names: list[str] | None = None  # of the columns of a dictionary
        self._collate = collate
        if (columns := _columns(data)) is not None:
            if collate is not None and what == "train":  # test data may need none
                raise UsageError(f"the {what} data are whole tensors, which need no collate function; omit collate")
            if not all(one.ndim for one in columns):
                raise UsageError(f"the {what} tensors must have a first dimension, the samples; one is a single number")
            lengths = [len(one) for one in columns]
            if len(set(lengths)) > 1:
                raise UsageError(f"the {what} tensors must be equally long, not {lengths}")
            self.names = list(data) if isinstance(data, Mapping) else None
            self._columns = tuple(_in_memory(one) for one in columns)
            if self.names is None and all(isinstance(one, Tensor) for one in self._columns):
                self.tensors = cast("tuple[Tensor, ...]", self._columns)
            self.length = lengths[0] if lengths else 0
        elif isinstance(data, IterableDataset) or not all(hasattr(data, one) for one in ("__getitem__", "__len__")):
            raise UsageError(
                f"{what} must be tensors, arrays, a data set with a length (__len__) and samples by index "
                f"(__getitem__), a DataLoader or an IterableDataset, not {type(data).__name__}"
            )
        else:
            self.length = len(data)
        if not self.length:
            raise UsageError(f"the {what} data set is empty")
        self.data = cast(MapDataset, data)
        # a subclass may make its samples in its own way
        self._tokens = data if type(data) is Tokens and collate is None else None

    def first(self, number: int) -> Samples:
        """The first `number` of these samples."""
        fewer = copy.copy(self)
        fewer.length = min(number, self.length)
        return fewer

    @property
    def in_memory(self) -> tuple[Tensor, ...] | None:
        """The columns, also those of a dictionary, where all of them are tensors in memory."""
        columns = self._columns or ()
        return cast("tuple[Tensor, ...]", columns) if columns and all(isinstance(c, Tensor) for c in columns) else None

    @property
    def draws(self) -> bool:
        """Whether code of the user makes the samples, which may draw random numbers."""
        return self._columns is None and self._tokens is None

    def take(self, indices: Indices) -> Parts:
        """The samples with these indices as a batch."""
        if self.tensors is not None:
            places = torch.from_numpy(indices)
            return tuple(t.index_select(0, places) for t in self.tensors)
        if self._columns is not None:
            return self._named([_rows(one, indices) for one in self._columns])
        if self._tokens is not None:
            return self._tokens.gathered(indices)
        many = getattr(self.data, "__getitems__", None)  # torch's protocol for data sets that read several at once
        drawn = [self.data[int(i)] for i in indices] if many is None else many([int(i) for i in indices])
        return parts_of((self._collate or default_collate)(drawn))

    def take_many(self, batches: Sequence[Indices]) -> list[Parts]:
        """The samples of several batches of equal size: what `take` gives for each, gathered together."""
        if self._columns is None:
            return [self.take(indices) for indices in batches]
        columns = [_rows_of_many(one, batches) for one in self._columns]
        return [self._named(parts) for parts in zip(*columns, strict=True)]

    def chunks(self, size: int) -> Iterator[tuple[Parts, int]]:
        """All samples in their order, and the number of each chunk."""
        for first in range(0, self.length, size):
            last = min(first + size, self.length)
            if self._columns is not None:
                parts = [
                    one[first:last] if isinstance(one, Tensor) else _tensor(one[first:last]) for one in self._columns
                ]
                yield self._named(parts), last - first
            else:
                yield self.take(np.arange(first, last)), last - first

    def _named(self, parts: Sequence[Tensor]) -> Parts:
        return tuple(parts) if self.names is None else (dict(zip(self.names, parts, strict=True)),)


def _columns(data: Any) -> list[Any] | None:
    """The tensors and arrays of a tuple, list or dictionary; None if it holds anything else."""
    if isinstance(data, Mapping):
        found = list(data.values())
    elif isinstance(data, tuple | list):
        found = list(data)
    else:
        return None
    if isinstance(data, Mapping) and not all(isinstance(name, str) for name in data):
        return None
    return found if all(isinstance(one, Tensor | np.ndarray) for one in found) else None


def _in_memory(column: Tensor | np.ndarray) -> Tensor | np.ndarray:
    """A tensor; a mapped file stays a file, of which a batch reads its own rows."""
    if isinstance(column, Tensor | np.memmap):
        return column
    if column.dtype.hasobject or column.dtype.kind not in "biufc":
        raise UsageError(f"an array of {column.dtype} holds no numbers")
    wider = WIDER.get(column.dtype.name)
    plain = np.ascontiguousarray(column if wider is None else column.astype(wider))
    return torch.from_numpy(plain if plain.flags.writeable else plain.copy())


def _rows(column: Tensor | np.ndarray, indices: Indices) -> Tensor:
    return column.index_select(0, torch.from_numpy(indices)) if isinstance(column, Tensor) else _tensor(column[indices])


def _rows_of_many(column: Tensor | np.ndarray, batches: Sequence[Indices]) -> list[Tensor]:
    """The rows of each batch. They share memory where the results of a model cannot depend on where a batch begins:
    numbers that are no floats are converted or looked up first."""
    size = len(batches[0])
    aligned = isinstance(column, Tensor) and not (column.is_floating_point() or column.is_complex())
    if not aligned and (column.nbytes // len(column)) * size % ALIGNED:
        return [_rows(column, indices) for indices in batches]
    together = _rows(column, np.concatenate(batches))
    return [together[first : first + size] for first in range(0, len(together), size)]


def _tensor(rows: np.ndarray) -> Tensor:
    """Rows of a mapped file, in memory."""
    return torch.from_numpy(np.array(rows, WIDER.get(rows.dtype.name, rows.dtype)))
