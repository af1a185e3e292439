"""What collectives over connections have in common: workers find each other in a store, and form groups there."""

from __future__ import annotations

from collections.abc import Callable

from paceline.config.endpoint import Endpoint
from paceline.network.means.distributed import DistributedMeans
from paceline.network.means.group import GroupMaker
from paceline.network.secure import secret, tls
from paceline.network.secure.admission import AdmissionListener, listener
from paceline.network.secure.store_server import KeyValueStore, StoreServer
from paceline.processes.memory.run_memory import RunMemory
from paceline.processes.transport import WaitFor


class Connected(GroupMaker):
    """A collective over connections. Members say how a group is made."""

    def means(self, memory: RunMemory, rank: int, wait_for: WaitFor) -> DistributedMeans:
        return DistributedMeans(memory, rank, wait_for, self)

    def store(self, endpoint: Endpoint, warn: Callable[[str], None]) -> StoreServer:
        listening = listener(endpoint.address, endpoint.ports)
        proof = endpoint.secret or secret.fresh()
        served = StoreServer(
            AdmissionListener(listening, proof, tls=tls.server_side(endpoint), log=warn), KeyValueStore()
        )
        served.place = (endpoint.address, listening.getsockname()[1], proof)
        return served
