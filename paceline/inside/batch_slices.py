"""The slices of a batch: consecutive samples, with weights by which the slices' gradients add up to the batch's."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.sampling import mixed
from paceline.task import Batch
from paceline.torch_task.batch_parts import cut, mapped, tensors_in


def slices(batch: Batch, count: int) -> list[Batch]:
    """The batch in `count` slices, as equal as can be. The loss is a mean over samples: the weight of a slice is its
    share of them. Random numbers differ between slices.

    A batch of fewer samples than slices leaves some without any: they repeat the first slice with weight 0, because all
    processes of a sharded model must compute together.
    """
    size = checked_size(batch)
    bounds = [(number * size + count - 1) // count for number in range(count + 1)]
    found = []
    for number, (first, last) in enumerate(pairwise(bounds)):
        share = batch.weight * (last - first) / size
        if first == last:
            first, last = bounds[:2]
        seed = mixed("inside", batch.seed, number)
        found.append(Batch(cut(batch.data, first, last), last - first, seed, share))
    return found


def checked_size(batch: Batch) -> int:
    """The number of samples; UsageError if some part of the batch cannot be cut into samples."""
    sizes = {len(one) for one in tensors_in(batch.data) if one.dim()}
    if not sizes:
        raise UsageError("inside: the batch has no tensor with a row per sample, so it cannot be sliced")
    if len(sizes) > 1:
        raise UsageError(
            f"inside: the tensors of a batch have {', '.join(map(str, sorted(sizes)))} rows: each needs one row per "
            "sample, or the batch cannot be sliced; change collate or prepare, or omit inside"
        )
    for one in leaves(batch.data):
        if isinstance(one, Tensor) and one.layout is not torch.strided:
            raise UsageError("inside: a batch of sparse tensors cannot be sliced; omit inside")
        if not isinstance(one, Tensor | str | int | float | None):
            raise UsageError(
                f"inside: the batch holds a {type(one).__name__}, which cannot be sliced: make it tensors with a row "
                "per sample, or omit inside"
            )
    return sizes.pop()


def leaves(part: Any) -> list[Any]:
    """What the tuples, lists and dictionaries of a batch hold."""
    if isinstance(part, dict):
        part = list(part.values())
    if type(part) in (tuple, list):
        return [leaf for one in part for leaf in leaves(one)]
    return [part]


def apart(batch: Batch) -> Batch:
    """A slice in memory of its own, as the process has it that computes it: other alignments may give other bits."""
    own = mapped(lambda one: one.clone(memory_format=torch.contiguous_format), batch.data)
    return dataclasses.replace(batch, data=own)
