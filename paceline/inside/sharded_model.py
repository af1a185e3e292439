"""A task's model sharded over the processes of a worker by FSDP2 (`torch.distributed.fsdp.fully_shard`), with Gloo."""

from __future__ import annotations

import copy
import ctypes
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.inside import gloo_group
from paceline.inside.sharded_vector import ShardedVector
from paceline.inside.sliced_task import SlicedTask
from paceline.state import Vector
from paceline.task import Batch
from paceline.torch_task import FlatModule, checked_loss, seeded

CONTAINERS = (nn.Sequential, nn.ModuleList)
MMAP_THRESHOLD, MAPPED = -3, 4 << 20  # M_MMAP_THRESHOLD of mallopt, and its value in bytes


class ShardedModel:
    """One process's part of a sharded model. All processes of the worker compute a gradient together, each of its own
    slice; each has shards of the parameters and of the summed gradient."""

    def __init__(self, task: SlicedTask, number: int, store: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh  # these take seconds, and only fsdp needs them
        from torch.distributed.fsdp import fully_shard

        _give_freed_memory_back()
        self._task, count = task, task.inside.processes
        gloo_group.meet(number, count, store)
        with gloo_group.loopback():
            mesh = init_device_mesh("cpu", (count,))
        self.module = copy.deepcopy(task.flat.module).train()
        scalars = [name for name, one in self.module.named_parameters() if not one.dim()]
        if scalars:
            raise UsageError(
                f"inside {task.inside}: {', '.join(scalars)} are single numbers, which fully_shard cannot cut; "
                "give them the shape (1,), or use ddp"
            )
        for part in (*blocks(self.module), self.module):
            fully_shard(part, mesh=mesh)
        sharded: Any
        for sharded in self.module.modules():
            if hasattr(sharded, "set_custom_reduce_scatter"):
                sharded.set_gradient_divide_factor(1.0)  # the weights of the slices add up to 1
                sharded.set_force_sum_reduction_for_comms(True)
                sharded.set_custom_reduce_scatter(_ordered_sum())
        # for the buffers, which are not sharded; made of the shards, as it holds the parameters that it finds
        self.flat = FlatModule(self.module)
        self.vector = ShardedVector(self.module)

    def gradient(self, x: Vector, part: Batch, out: Vector, buffers: Mapping[str, Tensor] | None) -> float:
        """The loss of this process's slice; writes the ranges of this process into `out`."""
        task = self._task
        self.vector.take(x)
        own = (task.buffers() if buffers is None else buffers) if task._state else {}
        self.flat.bind_buffers(own)
        with torch.enable_grad(), seeded(part.seed):
            with task._precision():
                loss = checked_loss(task._output_and_loss(part.data, self.module)[1], trains=True)
            (loss * part.weight if part.weight != 1.0 else loss).backward()  # type: ignore[no-untyped-call]
        self.flat.keep_buffers(own)
        self.vector.give_gradients(out)
        return float(loss.detach() * part.weight if part.weight != 1.0 else loss.detach())


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The parts that are gathered one after the other: the members of lists and sequences, as transformers have them.
    One that shares a parameter with the rest of the model is gathered with the rest."""
    owners = _owners(module)

    def within(holder: nn.Module) -> Iterator[nn.Module]:
        for part in holder.children():
            if isinstance(part, CONTAINERS) or not isinstance(holder, CONTAINERS):
                yield from within(part)
            elif (inner := _owners(part)) and all(owners[key] == number for key, number in inner.items()):
                yield part

    return within(module)


def _owners(module: nn.Module) -> Counter[int]:
    """How often each parameter is in a module."""
    return Counter(id(one) for part in module.modules() for one in part._parameters.values() if one is not None)


def _give_freed_memory_back() -> None:
    """Layers are gathered and freed again and again. glibc would keep what is freed for later: several times the model.
    With a threshold that does not grow, large tensors are mappings of their own, which end when they are freed."""
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL("libc.so.6").mallopt(MMAP_THRESHOLD, MAPPED)


def _ordered_sum() -> Any:
    """A reduce-scatter that adds up in the order of the processes: the bits of slices added one after the other."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

    class OrderedSum(ReduceScatter):
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
        ) -> None:
            rows = torch.empty_like(input_tensor)
            dist.all_to_all_single(rows, input_tensor, group=group)
            first, *others = rows.view(group.size(), -1)
            output_tensor.copy_(first)
            for row in others:
                output_tensor.add_(row)

    return OrderedSum()
