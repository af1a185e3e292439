"""Taking part in a run on several nodes, as coordinator or agent, by what the environment says of this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.config.endpoint import Certificates, Endpoint, Ports, ports_of
from paceline.config.plan import Plan
from paceline.errors import UsageError
from paceline.network.cluster import addresses, detect, placement
from paceline.network.cluster.assignment import Assignment, in_cluster, told
from paceline.network.cluster.description import Cluster, Slot
from paceline.network.nodes import agent
from paceline.network.nodes.coordinator import Coordinator, refuse_open_means
from paceline.network.nodes.join import POLICIES, JoinRequest
from paceline.network.secure import secret as secrets
from paceline.network.secure import tls
from paceline.processes.supervisor.supervisor import Supervisor
from paceline.scheme import Scheme
from paceline.signals import EXIT_CODE

JOIN = 600.0  # seconds
JOIN_POLICY = POLICIES[0]
GENERATED = "generated"  # as --tls has it


@dataclass(frozen=True)
class Network:
    """The options that say how other nodes reach this process."""

    interface: str | None = None
    infiniband: bool = True
    join: float = JOIN
    tls: str | None = None
    share: bool = True
    join_policy: str = JOIN_POLICY
    ports: Ports | None = None  # None: those of the environment, else any

    def __post_init__(self) -> None:
        if not self.join > 0:
            raise UsageError(f"--join must be above 0 seconds, not {self.join:g}")
        if self.join_policy not in POLICIES:
            raise UsageError(f"--join-policy must be {' or '.join(POLICIES)}, not {self.join_policy!r}")


def here(directory: str | Path | None) -> Assignment | None:
    """The assignment of this process in the cluster of the environment; None: it is alone."""
    return assigned(lambda: detect.seen(os.environ), None, None, None, str(directory) if directory else None)


def assigned(
    found: Callable[[], Cluster | None], by: str | None, servers: int | None, rule: str | None, directory: str | None
) -> Assignment | None:
    """The assignment of this process in its cluster; None: it is alone, and launches everything itself."""
    direct = told(os.environ)
    if direct is not None:
        return direct
    cluster = found()
    if cluster is None:
        if by is not None:
            raise UsageError("--placement needs the tasks of an engine; there is no cluster in the environment")
        return None
    if len(cluster.tasks) == 1:  # a cluster of one is this machine
        return _only(cluster)
    by = by or os.environ.get("PACELINE_PLACEMENT")
    if cluster.me is not None and not cluster.by_role:
        if by is None:
            by = "pack" if servers is None or servers > 0 else ",".join(["worker"] * len(cluster.tasks))
        cluster = _placed(cluster, by, servers)
    elif cluster.me is not None and by is not None:
        raise UsageError(f"{cluster.source} names the role of every task; --placement is for engines that do not")
    if rule is not None:
        cluster = addresses.called(cluster, addresses.site_rule(rule))
    return in_cluster(cluster, os.environ, None if directory is None else Path(directory).absolute() / "hub")


def _only(cluster: Cluster) -> Assignment | None:
    """The assignment in a cluster of one task. An engine that has started one process says nothing of workers."""
    if cluster.me is None or not cluster.by_role:
        return None
    if cluster.me not in cluster.tasks:
        raise UsageError(
            f"{cluster.source}: this process is the evaluator of a cluster with one task, which runs everything itself "
            "and waits for no other: add --evaluator to that one's command, or list the evaluator in the cluster"
        )
    return Assignment(cluster.source, ("chief",), 1, 0, False, alone=True)


def _placed(cluster: Cluster, by: str, servers: int | None) -> Cluster:
    """By slots; where an engine does not say which tasks share a node, a list of roles goes by rank."""
    listed = "," in by
    if listed and not cluster.seats:
        seats = tuple(Slot(0, rank, task.host, task.port) for rank, task in enumerate(cluster.tasks))
        own = None if cluster.me is None else seats[cluster.tasks.index(cluster.me)]
        cluster = replace(cluster, seats=seats, seat=own)
    return placement.placed(cluster, by, None if listed else servers)


def secret_of(directory: str | None) -> bytes:
    """The shared secret: of the environment, of the run directory, or of this user."""
    given = secrets.of_environment(os.environ)
    if given is not None:
        return given
    if directory is not None and (path := Path(directory) / "secret").exists():
        return secrets.read(path)
    return secrets.of_user()


def certificates_of(text: str | None, directory: str | None) -> Certificates | None:
    if text is None:
        return None
    if text == GENERATED:
        return tls.generated(_seen_by_all(directory))
    parts = [Path(part) for part in text.split(",")]
    if not 2 <= len(parts) <= 3:
        raise UsageError("--tls: write CERTIFICATE,KEY or CERTIFICATE,KEY,AUTHORITY, or generated")
    return Certificates(parts[0], parts[1], parts[2] if len(parts) > 2 else None)


def _seen_by_all(directory: str | None) -> Path:
    if directory is None:
        raise UsageError("--tls generated keeps its certificate in the run directory: give --dir, seen by all")
    return Path(directory)


def check_means(plan: Plan, network: Network) -> None:
    """Refuse, before anything is made, a run on several nodes whose means would not be protected as it asks for."""
    refuse_open_means(plan.collective, network.tls is not None)


def take_part(
    given: Assignment,
    network: Network,
    directory: str | None,
    say: Callable[[str], None],
    objects: dict[str, Any] | None = None,
) -> int:
    """Be an agent: one role of a run whose hub is another process. Gives the exit code. `objects`: task, scheme and
    hooks without a name, which every process of the run must bring itself."""
    secret = secret_of(directory)
    certificates = None if network.tls == GENERATED else certificates_of(network.tls, directory)
    allowed = network.ports or ports_of(os.environ)
    if allowed is None and given.port is not None:  # the cluster's word; if that port is in use, the system's choice
        allowed = Ports(given.port, given.port, firm=False)

    def way() -> JoinRequest | None:
        hub = given.find(os.environ)
        if hub is None:
            return None
        held = tls.generated_by(hub, _seen_by_all(directory)) if network.tls == GENERATED else certificates
        own = given.own(hub, network.interface, network.infiniband, os.environ)
        return JoinRequest(*hub, given.roles, Endpoint(0, own, secret, held, network.share, ports=allowed))

    code = agent.serve(way, network.join, say, objects)
    # mpirun would kill all ranks, also the chief, which still writes its result
    kept = any(engine.ends_all for engine in detect.present(os.environ))
    return 0 if code == EXIT_CODE and kept else code


def hub_of(
    given: Assignment, network: Network, directory: str, say: Callable[[str], None]
) -> Callable[..., Supervisor]:
    """What makes the supervisor of a run whose chief is on this node."""
    if given.alone:
        return Supervisor
    address, port = given.listen(network.interface, network.infiniband, os.environ)
    certificates = certificates_of(network.tls, directory)
    allowed = network.ports or ports_of(os.environ)
    node = Endpoint(0, address, secret_of(directory), certificates, network.share, ports=allowed)

    def make(plan: Plan, scheme: Scheme, objects: dict[str, Any], **rest: Any) -> Supervisor:
        if allowed is not None and plan.collective in ("gloo", "nccl"):
            say(f"warning: --collective {plan.collective} listens on ports of its own choice, not only on {allowed}")
        hub = Coordinator(
            plan,
            scheme,
            objects,
            node=node,
            port=port,
            here=set(given.roles),
            join=network.join,
            join_policy=network.join_policy,
            listening=lambda host, chosen: given.announce((host, chosen), os.environ, say),
            **rest,
        )
        hub.at_end = given.withdraw
        return hub.supervisor

    return make


def counted(given: Assignment, settings: dict[str, Any], scheme: Scheme) -> dict[str, Any]:
    """The settings of a run, with the numbers of workers and servers in its cluster."""
    servers = settings.get("servers") or 1 if given.alone else given.servers
    for name, there in (("workers", given.workers), ("servers", servers)):
        counts = name == "workers" or scheme.methods
        if counts and settings.get(name) not in (None, there):
            raise UsageError(f"--{name} {settings[name]}, but {given.source} has {there}; omit --{name}")
    if scheme.methods and not servers:
        raise UsageError(f"{scheme.name} needs a server, and {given.source} has none: make one task a ps")
    found = settings | {"workers": given.workers, "servers": servers if scheme.methods else 0}
    return found | ({"evaluator": True} if given.evaluator else {})
