"""The mini-batches of many workers at once, stacked: gathered on the device where that is possible, else one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import RunError, UsageError
from paceline.task import Batch
from paceline.torch_task.batch_parts import Parts, mapped, tensors_in
from paceline.torch_task.index_tables import IndexTable
from paceline.torch_task.samples import Samples

if TYPE_CHECKING:
    from paceline.torch_task import TorchTask


@dataclass(frozen=True)
class Drawn:
    """Batches with parts of equal shapes. `rows`: their places among those that were asked for."""

    rows: list[int]
    parts: Parts  # every tensor has the batches as its first dimension
    size: int
    weight: float
    prepared: bool  # whether `prepare` has been called


class GatheredBatches:
    """Samples that are tensors in memory: kept on the device, and gathered there for all workers in one call."""

    def __init__(self, task: TorchTask, workers: int, seed: int, columns: Sequence[Tensor]) -> None:
        assert isinstance(task.train, Samples)
        self._names = task.train.names
        self._columns = [column.to(task._device) for column in columns]
        streams = [task.stream(rank, workers, seed) for rank in range(workers)]
        groups: dict[tuple[Any, ...], list[int]] = {}
        for rank, one in enumerate(streams):
            groups.setdefault((one.size, one.weight, one.n, one.drawn_from), []).append(rank)
        self._groups = [
            (ranks, IndexTable([streams[rank] for rank in ranks], task._device), streams[ranks[0]])
            for ranks in groups.values()
        ]
        self._group_of, self._place_of = np.empty(workers, np.int64), np.empty(workers, np.int64)
        for number, (ranks, _, _) in enumerate(self._groups):
            self._group_of[ranks], self._place_of[ranks] = number, np.arange(len(ranks))

    def draw(self, ranks: Sequence[int], numbers: Sequence[int]) -> Iterator[Drawn]:
        asked, counts = np.array(ranks, np.int64), np.array(numbers, np.int64)
        groups = self._group_of[asked]
        for number, (_, table, stream) in enumerate(self._groups):
            rows = np.flatnonzero(groups == number)
            if rows.size:
                chosen = table.indices(self._place_of[asked[rows]], counts[rows])
                parts: Parts = tuple(
                    column.index_select(0, chosen.view(-1)).view(*chosen.shape, *column.shape[1:])
                    for column in self._columns
                )
                if self._names is not None:
                    parts = (dict(zip(self._names, parts, strict=True)),)
                yield Drawn(rows.tolist(), parts, stream.size, stream.weight, prepared=False)


class StackedBatches:
    """Batches of any data: each worker's own are read, and those of equal shapes are stacked."""

    def __init__(self, task: TorchTask, workers: int, seed: int) -> None:
        self._task, self._workers, self._seed = task, workers, seed
        self._read: dict[int, tuple[int, Iterator[Batch]]] = {}  # worker -> the number of its next batch, and the rest

    def draw(self, ranks: Sequence[int], numbers: Sequence[int]) -> Iterator[Drawn]:
        groups: dict[Any, list[tuple[int, Batch]]] = {}
        for row, (rank, number) in enumerate(zip(ranks, numbers, strict=True)):
            batch = self._next(rank, number)
            parts = list(tensors_in(batch.data))
            if not _only_tensors(batch.data):
                raise UsageError(
                    f"task {self._task.name!r}: its batches hold objects that are no tensors, which batched cannot "
                    "stack; omit it"
                )
            key = (batch.size, batch.weight, *((part.shape, part.dtype) for part in parts))
            groups.setdefault(key, []).append((row, batch))
        for found in groups.values():
            rows, batches = [row for row, _ in found], [batch for _, batch in found]
            stacks = iter([torch.stack(same) for same in zip(*(tensors_in(one.data) for one in batches), strict=True)])
            together: Parts = mapped(partial(_replaced, stacks), batches[0].data)
            yield Drawn(rows, together, batches[0].size, batches[0].weight, prepared=True)

    def _next(self, rank: int, number: int) -> Batch:
        at, batches = self._read.get(rank, (-1, iter(())))
        if at != number:
            batches = self._task.batches(rank, self._workers, self._seed, first=number)
        batch = next(batches, None)
        if batch is None:
            raise RunError(f"worker:{rank}, batch {number}: the task has no more mini-batches")
        self._read[rank] = number + 1, batches
        return batch


def _replaced(stacks: Iterator[Tensor], _: Tensor) -> Tensor:
    return next(stacks)


def _only_tensors(part: Any) -> bool:
    if isinstance(part, dict):
        part = tuple(part.values())
    return isinstance(part, Tensor) or (type(part) in (tuple, list) and all(map(_only_tensors, part)))


def gatherable(task: TorchTask) -> tuple[Tensor, ...] | None:
    """The columns of a task's samples if they can be gathered on its device."""
    train = task.train
    if not isinstance(train, Samples) or (columns := train.in_memory) is None:
        return None
    if not task.stream(0, 1, 0).in_key_order:
        return None
    if task._device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(task._device)
        if sum(column.nbytes for column in columns) > free // 4:
            return None
    return columns
