"""Several machines: calls and replies over authenticated TCP connections, from one node's memory into another's."""

from __future__ import annotations

from collections.abc import Callable

from paceline.network.calls.tcp_client import Reach
from paceline.network.calls.tcp_server import Door, Following
from paceline.processes.calls.mailbox import Lane
from paceline.processes.memory.run_memory import Stage


class Tcp:
    """Servers of this node work in shared memory all the same; those of other nodes are connected to."""

    name = "tcp"

    def calls(self, memory: Stage, rank: int, lanes: list[Lane], ended: Callable[[], bool]) -> Reach:
        return Reach(memory, rank, lanes, ended)

    def port(self, memory: Stage, shard: int, lanes: list[Lane]) -> Door:
        return Door(memory, shard, lanes)

    def order(self, memory: Stage, shard: int) -> Following:
        return Following(memory, shard)
