"""Several machines: calls and replies over authenticated TCP connections, from one node's memory into another's."""

from __future__ import annotations

from collections.abc import Callable

from paceline.network.calls.tcp_client import TcpClient
from paceline.network.calls.tcp_server import OrderFollower, TcpServer
from paceline.processes.calls.mailbox import Mailbox
from paceline.processes.memory.run_memory import RunMemory


class TcpTransport:
    """Servers of this node work in shared memory all the same; those of other nodes are connected to."""

    name = "tcp"

    def calls(self, memory: RunMemory, rank: int, mailboxes: list[Mailbox], ended: Callable[[], bool]) -> TcpClient:
        return TcpClient(memory, rank, mailboxes, ended)

    def port(self, memory: RunMemory, shard: int, mailboxes: list[Mailbox]) -> TcpServer:
        return TcpServer(memory, shard, mailboxes)

    def order(self, memory: RunMemory, shard: int) -> OrderFollower:
        return OrderFollower(memory, shard)
