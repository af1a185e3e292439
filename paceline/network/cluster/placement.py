"""The roles of tasks that an engine only numbers: by a list of roles, or by a policy.

Tasks are identified by their slot, (node, number on that node), so the result depends neither on ranks nor on the order
of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from paceline.config.role_names import KINDS, SINGLE, WORDS
from paceline.errors import UnknownName, UsageError
from paceline.network.cluster.description import Cluster, ClusterTask

Place = tuple[int, int]


def roles(places: Iterable[Place], placement: str, servers: int | None = None) -> dict[Place, str]:
    """The kind of every task: by a list, `ps,worker,worker`, node by node, or by a policy such as pack."""
    ordered = sorted(places)
    if placement in POLICIES:
        return _by_policy(ordered, placement, servers)
    if "," not in placement and placement not in WORDS:
        raise UnknownName("placement", placement, [*POLICIES, "ps,worker,…"])
    if servers is not None:
        raise UsageError("a placement by a list of roles says itself how many servers there are; omit --servers")
    return _by_list(ordered, placement.split(","))


def placed(cluster: Cluster, placement: str, servers: int | None = None) -> Cluster:
    """A cluster of numbered tasks with roles. The tasks of a kind are numbered node by node."""
    if cluster.by_role:
        raise UsageError(f"{cluster.source} names the role of every task; --placement is for engines that do not")
    if not cluster.seats:
        raise UsageError(f"{cluster.source} does not tell which tasks share a node; --placement needs to know it")
    seats = {(seat.node, seat.local): seat for seat in cluster.seats}
    given = roles(seats, placement, servers)
    tasks: list[ClusterTask] = []
    me = None
    for kind in KINDS:
        own = [place for place in sorted(given) if given[place] == kind]
        for index, place in enumerate(own):
            task = ClusterTask(kind, index, seats[place].host, seats[place].port)
            tasks.append(task)
            if seats[place] == cluster.seat:
                me = task
    return replace(cluster, tasks=tuple(tasks), me=me, by_role=True)


def _by_list(ordered: list[Place], words: list[str]) -> dict[Place, str]:
    kinds = []
    for word in (word.strip() for word in words):
        if word not in WORDS:
            raise UnknownName("role", word, WORDS)
        kinds.append(WORDS[word])
    if len(kinds) < len(ordered):
        left = len(ordered) - len(kinds)
        raise UsageError(f"there are more tasks ({len(ordered)}) than roles ({len(kinds)}): {left} would have none")
    if len(kinds) > len(ordered):
        left = len(kinds) - len(ordered)
        raise UsageError(f"there are more roles ({len(kinds)}) than tasks ({len(ordered)}): {left} would have no task")
    for kind in SINGLE:
        if kinds.count(kind) > 1:
            raise UsageError(f"the placement names {kinds.count(kind)} {kind}s; there can be one")
    if "chief" not in kinds:
        if "worker" not in kinds:
            raise UsageError("the placement names no worker")
        kinds[kinds.index("worker")] = "chief"
    return dict(zip(ordered, kinds, strict=True))


def _by_policy(ordered: list[Place], policy: str, servers: int | None) -> dict[Place, str]:
    if servers is not None and servers < 0:
        raise UsageError(f"the number of servers must be at least 0, not {servers}")
    serving = set(POLICIES[policy](ordered, servers))
    training = [place for place in ordered if place not in serving]
    if not training:
        count = max(servers or 0, len(serving))
        raise UsageError(f"{policy}: {count} servers among {len(ordered)} tasks leave no worker")
    kinds = {place: "server" if place in serving else "worker" for place in ordered}
    return kinds | {training[0]: "chief"}


def _pack(ordered: list[Place], servers: int | None) -> list[Place]:
    """Servers fill the first node, then the next."""
    return ordered[: 1 if servers is None else servers]


def _spread(ordered: list[Place], servers: int | None) -> list[Place]:
    """Servers on different nodes as far as possible: the first task of every node, then the second of every node, …"""
    turn: dict[Place, int] = {}
    met: dict[int, int] = {}
    for place in ordered:
        turn[place] = met[place[0]] = met.get(place[0], -1) + 1
    return sorted(ordered, key=lambda place: (turn[place], place))[: 1 if servers is None else servers]


def _per_node(ordered: list[Place], servers: int | None) -> list[Place]:
    """One server on each node: its first task."""
    nodes = {node for node, _ in ordered}
    if servers is not None and servers != len(nodes):
        raise UsageError(f"ps-per-node gives {len(nodes)} servers to {len(nodes)} nodes, not {servers}")
    return _spread(ordered, len(nodes))


Policy = Callable[[list[Place], int | None], list[Place]]
POLICIES: dict[str, Policy] = {"pack": _pack, "spread": _spread, "ps-per-node": _per_node}
