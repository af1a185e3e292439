"""The variables of Slurm. They tell only in part which rank runs on which node, since ranks need not fill node by node.

Nodes, tasks per node and reserved ports are told, so every *slot* has an address, and a placement by slots is complete.
Ranks are told for this node (SLURM_GTIDS); the rest follows where only one node is left, or each node has one task.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.errors import UsageError
from paceline.network.cluster import slurm_hostlist
from paceline.network.cluster.description import Cluster, ClusterTask, Slot
from paceline.network.cluster.detect import EnvironmentSource, Variables, any_set

NAME = "Slurm"
RANK = "SLURM_PROCID"
_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_COUNTS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_STEP = ("SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
_PORTS = "SLURM_STEP_RESV_PORTS"


def _read(given: Variables) -> Cluster:
    """The tasks of a job step, all workers until a placement gives them roles."""
    if given.text(*_STEP) is None:
        return _allocation(given)
    given.need(
        "SLURM_PROCID", "SLURM_NTASKS|SLURM_STEP_NUM_TASKS", "SLURM_NODEID", "SLURM_LOCALID", "|".join(_NODES[:2])
    )
    size = given.size("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS")
    rank = given.needed(RANK, below=("SLURM_NTASKS", size))
    node, local = given.needed("SLURM_NODEID"), given.needed("SLURM_LOCALID")
    hosts, counts, unfit = _layout(given, size)
    step = f"{given.text('SLURM_JOB_ID') or '?'}.{given.text('SLURM_STEP_ID') or '?'}"
    source = f"{NAME} step {step}"
    if unfit:
        tasks = [ClusterTask("worker", one) for one in range(size)]
        tasks[rank] = ClusterTask("worker", rank, given.text("SLURMD_NODENAME"))
        return Cluster(source, tuple(tasks), tasks[rank], by_role=False, notes=(unfit,))
    if node >= len(hosts):
        raise UsageError(f"{NAME}: SLURM_NODEID is {node}, but {given.name(*_NODES)} has {len(hosts)} nodes")
    if local >= counts[node]:
        raise UsageError(f"{NAME}: SLURM_LOCALID is {local}, but node {node} has {counts[node]} tasks")
    seats = _seats(hosts, counts, _ports(given, counts))
    by_place = {(seat.node, seat.local): seat for seat in seats}
    places = _places(given, counts, rank, (node, local))
    known = {one: (seat.host, seat.port) for one, place in places.items() if (seat := by_place.get(place))}
    tasks = [ClusterTask("worker", one, *known.get(one, (None, None))) for one in range(size)]
    notes = () if seats[0].port else (f"{_PORTS} is not set: srun --resv-ports={max(counts)} reserves ports",)
    return Cluster(source, tuple(tasks), tasks[rank], False, tuple(seats), by_place[node, local], notes=notes)


def _allocation(given: Variables) -> Cluster:
    """The cluster of a batch script or the shell of an allocation: this process is not one of the tasks."""
    given.need("|".join(_NODES[1:]), "SLURM_TASKS_PER_NODE|SLURM_NTASKS")
    hosts, counts, unfit = _layout(given, given.number("SLURM_NTASKS", least=1))
    size = given.size("SLURM_NTASKS") if unfit else sum(counts)
    tasks = tuple(ClusterTask("worker", rank, hosts[0] if len(hosts) == 1 else None) for rank in range(size))
    seats = () if unfit else tuple(_seats(hosts, counts, None))
    notes = ("this is the script or shell of an allocation, not a task of it: start the tasks with srun",)
    source = f"{NAME} job {given.text('SLURM_JOB_ID') or '?'}"
    return Cluster(source, tasks, by_role=False, seats=seats, notes=(unfit, *notes) if unfit else notes)


def _layout(given: Variables, size: int | None) -> tuple[list[str], list[int], str]:
    """Hosts, tasks on each, and why they contradict each other ("": they do not)."""
    nodes, per_node = given.name(*_NODES) or "", given.name(*_COUNTS)
    hosts = slurm_hostlist.hosts(given.text(nodes) or "", nodes)
    if len(set(hosts)) < len(hosts):
        raise UsageError(f"{NAME}: {nodes} names a node twice: {given.text(nodes)}")
    if per_node is None:
        if len(hosts) == 1 and size is not None:
            return hosts, [size], ""
        return hosts, [], f"{_COUNTS[0]} is missing: how many tasks each node has is not told"
    counts = slurm_hostlist.counts(given.text(per_node) or "", per_node)
    if len(counts) != len(hosts):
        return hosts, [], f"{per_node} tells of {len(counts)} nodes, but {nodes} of {len(hosts)}"
    if size is not None and sum(counts) != size:
        return hosts, [], f"{per_node} tells of {sum(counts)} tasks, but there are {size}"
    return hosts, counts, ""


def _ports(given: Variables, counts: list[int]) -> list[int] | None:
    """One for each task of a node; every node has the same ones reserved."""
    text = given.text(_PORTS)
    if text is None:
        return None
    ports = slurm_hostlist.ports(text, _PORTS)
    if len(ports) < max(counts):
        raise UsageError(
            f"{NAME}: {_PORTS} holds {len(ports)} ports, but a node has {max(counts)} tasks; "
            f"ask for them with srun --resv-ports={max(counts)}"
        )
    return ports


def _seats(hosts: list[str], counts: list[int], ports: list[int] | None) -> list[Slot]:
    return [
        Slot(node, local, host, ports[local] if ports else None)
        for node, (host, count) in enumerate(zip(hosts, counts, strict=True))
        for local in range(count)
    ]


def _places(given: Variables, counts: list[int], rank: int, mine: tuple[int, int]) -> dict[int, tuple[int, int]]:
    """The slot (node, number on it) of every rank that is told or follows."""
    everyone = range(sum(counts))
    here = list(everyone) if len(counts) == 1 else _on_this_node(given, counts[mine[0]], rank)
    if len(here) < counts[mine[0]]:
        return {rank: mine}
    places = {one: (mine[0], local) for local, one in enumerate(here)}
    if places.get(rank) != mine:
        raise UsageError(f"{NAME}: SLURM_LOCALID is {mine[1]}, but rank {rank} is no. {here.index(rank)} on its node")
    others = [node for node in range(len(counts)) if node != mine[0]]
    if len(others) == 1:
        rest = [one for one in everyone if one not in places]
        places |= {one: (others[0], local) for local, one in enumerate(rest)}
    elif max(counts) == 1 and rank == mine[0] and "arbitrary" not in (given.text("SLURM_DISTRIBUTION") or ""):
        places = {one: (one, 0) for one in everyone}  # blocks and cycles of one task are the same
    return places


def _on_this_node(given: Variables, count: int, rank: int) -> list[int]:
    """SLURM_GTIDS: the ranks of this node, in the order of their numbers there."""
    text = given.text("SLURM_GTIDS")
    if text is None:
        return [rank]
    words = text.split(",")
    if not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
        raise UsageError(f"{NAME}: SLURM_GTIDS must be ranks with commas between, not {text!r}")
    ranks = [int(word) for word in words]
    if len(set(ranks)) != count or len(ranks) != count or rank not in ranks:
        raise UsageError(f"{NAME}: SLURM_GTIDS is {text!r}; it should be the {count} ranks of this node, with {rank}")
    return ranks


def _job(environment: Mapping[str, str]) -> str | None:
    job = environment.get("SLURM_JOB_ID")
    step, again = environment.get("SLURM_STEP_ID", "0"), environment.get("SLURM_RESTART_COUNT", "0")
    return None if job is None else f"slurm-{job}.{step}.{again}"


SOURCE = EnvironmentSource(NAME, RANK, 30, any_set("SLURM_JOB_ID", RANK, *_STEP), _read, _job)
