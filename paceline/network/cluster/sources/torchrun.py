"""The variables of torchrun, and of anything else that sets those of torch.distributed's `env://`.

All processes can meet at MASTER_ADDR:MASTER_PORT. Under torchrun its agent listens there; without an agent rank 0 does.
torchrun numbers ranks node by node (GROUP_RANK), but tells only how many processes this node has.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.errors import UsageError
from paceline.network.cluster.description import Cluster, ClusterTask, Slot, address
from paceline.network.cluster.detect import EnvironmentSource, Variables

NAME = "torchrun"
RANK = "RANK"


def _present(environment: Mapping[str, str]) -> bool:
    """RANK alone may have another meaning."""
    ours = environment.get("TORCHELASTIC_RUN_ID")
    return bool(ours or (environment.get(RANK) and (environment.get("WORLD_SIZE") or environment.get("MASTER_ADDR"))))


def has_agent(given: Variables) -> bool:
    """Whether torchrun's agent listens at the meeting point."""
    return (given.text("TORCHELASTIC_USE_AGENT_STORE") or "").lower() in ("true", "1")


def _read(given: Variables) -> Cluster:
    given.need(RANK, "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    size = given.size("WORLD_SIZE")
    rank = given.needed(RANK, below=("WORLD_SIZE", size))
    master = given.text("MASTER_ADDR") or ""
    bracketed = f"[{master}]" if ":" in master and not master.startswith("[") else master
    meeting = f"{bracketed}:{given.text('MASTER_PORT')}"
    host, port = address(meeting, f"{NAME}: MASTER_ADDR and MASTER_PORT")
    agent = has_agent(given)
    counts, notes = _counts(given, size)
    if len(counts) == 1:  # all on this host
        hosts: dict[int, str] = dict.fromkeys(range(size), "localhost" if agent else host)
    else:
        hosts = {} if agent else {0: host}
    tasks = tuple(ClusterTask("worker", one, hosts.get(one), None if one or agent else port) for one in range(size))
    places = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    seats = tuple(Slot(*place, task.host, task.port) for place, task in zip(places, tasks, strict=False))
    own = seats[rank] if seats else None
    told = (given.number("GROUP_RANK"), given.number("LOCAL_RANK"))
    if own is not None and told != (own.node, own.local):
        raise UsageError(
            f"{NAME}: RANK {rank} would be process {own.local} of node {own.node}, "
            f"but LOCAL_RANK is {told[1]} and GROUP_RANK is {told[0]}"
        )
    return Cluster(NAME, tasks, tasks[rank], False, seats, own, meeting, tuple(notes))


def _counts(given: Variables, size: int) -> tuple[list[int], list[str]]:
    """Processes of each node, where they follow from what is told."""
    missing = [name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK") if given.text(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        return [], [f"{', '.join(missing)} {verb} missing: which processes share a node is not told"]
    here = given.needed("LOCAL_WORLD_SIZE", least=1)
    if here > size:
        raise UsageError(f"{NAME}: LOCAL_WORLD_SIZE is {here}, but WORLD_SIZE is {size}")
    given.needed("LOCAL_RANK", below=("LOCAL_WORLD_SIZE", here))
    if here == size:
        return [size], []
    nodes = given.number("GROUP_WORLD_SIZE", least=1)
    node = given.needed("GROUP_RANK", below=None if nodes is None else ("GROUP_WORLD_SIZE", nodes))
    if nodes == size:
        return [1] * size, []
    if nodes == 2:
        return [here, size - here] if node == 0 else [size - here, here], []
    return [], ["how many processes other nodes have is not told"]


# torchrun may be started by mpirun or srun, whose variables its processes inherit
SOURCE = EnvironmentSource(NAME, RANK, 10, _present, _read)
