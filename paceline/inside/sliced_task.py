"""A task whose gradients are computed slice by slice: what a worker of several processes computes, in one process.

Replays and the simulator use it as it is. The worker's processes (`processes/inside/`) give the same bits: the slices
are the same, and are added up in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.inside.batch_slices import apart, slices
from paceline.inside.kind import Inside
from paceline.state import Vector
from paceline.task import Batch, Task
from paceline.torch_task import TorchTask
from paceline.torch_task.many_gradients import ManyGradients

NORM_OFFSET = 1e-6  # as torch's clip_grad_norm_ has it


class SlicedTask(TorchTask):
    """The task with sliced gradients; data, evaluation and parameters are those of the task.

    Buffers (BatchNorm's statistics): every slice starts with the worker's, and those of the first slice are kept, as
    torch's DistributedDataParallel does by default. BatchNorm normalises each slice by itself.
    """

    def __init__(self, task: TorchTask, inside: Inside) -> None:
        vars(self).update(vars(task))
        self.inside = inside
        self.clip_sum, self.clip = task.clip, None  # the sum is clipped, not the slices
        self._row = torch.empty(0)

    def grad(
        self, x: Vector, batch: Batch, out: Vector | None = None, buffers: Mapping[str, Tensor] | None = None
    ) -> tuple[float, Vector]:
        out = self._out if out is None else out
        if self._row.shape != out.shape or self._row.dtype != out.dtype:
            self._row = torch.empty_like(out)
        before = {name: one.clone() for name, one in (self.buffers() if buffers is None else buffers).items()}
        losses = []
        for number, part in enumerate(slices(batch, self.inside.processes)):
            if not number:
                loss, _ = self.slice_gradient(x, part, out, buffers)
            else:
                own = {name: one.clone() for name, one in before.items()}
                loss, _ = self.slice_gradient(x, apart(part), self._row, own or None)
                out.add_(self._row)
            losses.append(loss)
        self.finish(out)
        return sum(losses), out

    def slice_gradient(
        self, x: Vector, part: Batch, out: Vector, buffers: Mapping[str, Tensor] | None
    ) -> tuple[float, Vector]:
        """Loss and gradient of one slice, with the weight of the slice."""
        return super().grad(x, part, out, buffers)

    def finish(self, out: Vector) -> None:
        """What follows when the slices have been added up."""
        if self.clip_sum is not None:
            sizes = [one.numel() for one in self.flat.parameters]
            norms = [torch.linalg.vector_norm(one) for one in torch.split(out, sizes)]
            total = torch.linalg.vector_norm(torch.stack(norms))
            out.mul_(torch.clamp(self.clip_sum / (total + NORM_OFFSET), max=1.0))

    @property
    def follows(self) -> bool:
        return False  # the sum is known at the end only

    def watch(self, useless: Callable[[], bool] | None) -> None:
        """A sliced gradient is computed to its end, also where it has become useless."""

    def batched(self, workers: int, seed: int) -> ManyGradients:
        raise UsageError(f"inside {self.inside}: sliced gradients are computed one by one; omit batched")


def sliced(task: Task, inside: str) -> Task:
    """The task as workers of several processes compute it; the task itself if `inside` is empty."""
    kind = Inside.read(inside)
    if kind is None:
        return task
    if not isinstance(task, TorchTask):
        raise UsageError(
            f"inside {kind}: task {task.name!r} is not a TorchTask: which rows of its batches are samples is not "
            "known, so they cannot be sliced; omit inside"
        )
    if task.batch and task.batch < kind.processes:
        raise UsageError(
            f"inside {kind}: a batch of {task.batch} has no sample for each of {kind.processes} processes; raise batch"
        )
    if kind.kind == "fsdp" and task._compile is not None:
        raise UsageError(f"inside {kind}: a compiled model was never tried as shards; omit compile, or use ddp")
    return SlicedTask(task, kind)
