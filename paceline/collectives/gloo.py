"""Means by torch's Gloo, on CPUs."""

from __future__ import annotations

from paceline.network.means.distributed import Connected
from paceline.network.means.group import GroupRequest
from paceline.network.means.process_group import TorchGroup
from paceline.processes.memory.run_memory import RunMemory


class GlooCollective(Connected):
    """A group is a process group of torch.distributed. Its connections are neither authenticated nor encrypted."""

    name = "gloo"

    def group(self, memory: RunMemory, request: GroupRequest) -> TorchGroup:
        return TorchGroup(self.name, request, memory.node.address)
