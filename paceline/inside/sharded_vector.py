"""The parameters of a model sharded by FSDP2 (`fully_shard`) as one flat vector: each process has some ranges of it.

FSDP2 cuts a parameter by its first dimension, so the shard of a process is one contiguous range of the vector. A vector
in memory that the processes share is filled, and read, by each of them in its own ranges: no process gathers the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.state import Vector


@dataclass(frozen=True)
class ParameterShard:
    """Where the local shard of a parameter is in the vector."""

    parameter: nn.Parameter
    first: int
    last: int


class ShardedVector:
    """The trainable parameters of a sharded model, in the order of `module.parameters()`, as ranges of one vector."""

    def __init__(self, module: nn.Module) -> None:
        from torch.distributed.tensor import DTensor, Shard  # loading it takes seconds, and only sharded models need it

        self.ranges: list[ParameterShard] = []
        self.size = 0
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            if not isinstance(parameter, DTensor):
                raise UsageError(f"{name} is not sharded: call fully_shard on the model first")
            if parameter.device_mesh.ndim != 1 or parameter.placements != (Shard(0),):
                raise UsageError(
                    f"{name} is sharded as {parameter.placements} over {parameter.device_mesh.ndim} dimensions; "
                    "a flat vector needs fully_shard over one dimension, which cuts the first one of a parameter"
                )
            rows, width = parameter.shape[0], parameter[0].numel() if parameter.shape[0] else 0
            first = min(parameter.device_mesh.get_local_rank() * -(-rows // parameter.device_mesh.size()), rows)
            last = first + parameter.to_local().shape[0]
            self.ranges.append(ParameterShard(parameter, self.size + first * width, self.size + last * width))
            self.size += rows * width

    @torch.no_grad()
    def take(self, x: Vector) -> None:
        """Set this process's shards of the parameters from the whole vector."""
        for one in self.ranges:
            local = _local(one.parameter)
            local.copy_(x[one.first : one.last].view_as(local))

    @torch.no_grad()
    def give(self, out: Vector) -> None:
        """Write this process's shards of the parameters into its ranges of the whole vector."""
        for one in self.ranges:
            out[one.first : one.last] = _local(one.parameter).reshape(-1)

    @torch.no_grad()
    def give_gradients(self, out: Vector) -> None:
        """Write this process's shards of the gradients into its ranges, and forget them; 0 where there is none."""
        for one in self.ranges:
            place, gradient = out[one.first : one.last], one.parameter.grad
            if gradient is None:
                place.zero_()
            else:
                torch.add(_local(gradient).reshape(-1), 0.0, out=place)  # no -0.0: a sum that starts at 0 has none
            one.parameter.grad = None


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local()
    return local
