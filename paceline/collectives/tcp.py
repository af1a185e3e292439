"""Means over paceline's own TCP connections, with the run's secret and its TLS."""

from __future__ import annotations

import socket

from paceline.network.means.distributed import Connected
from paceline.network.means.group import GroupRequest
from paceline.network.means.peer_connections import connected, listener_of
from paceline.network.means.tcp_group import TcpGroup
from paceline.network.secure import tls
from paceline.processes.memory.run_memory import RunMemory

UNREACHED = 3.0  # patiences after which a worker that is alive and cannot be reached ends the run


class TcpCollective(Connected):
    """Every member of a group is connected to every other one."""

    name = "tcp"

    def prepare(self, memory: RunMemory) -> None:
        listener_of(memory.node)

    def connections(self, memory: RunMemory, request: GroupRequest) -> dict[int, socket.socket]:
        node = memory.node
        assert node.store is not None
        patience = UNREACHED * memory.plan.patience
        return connected(request, listener_of(node), node.store[2], tls.client_side(node), patience=patience)

    def group(self, memory: RunMemory, request: GroupRequest) -> TcpGroup:
        connections = self.connections(memory, request)
        return TcpGroup(request.place, len(request.members), connections, watch=memory.wakeup, ring=request.ring)
