"""The assignment of this process: its roles in a run on several nodes, and the address of the run's hub.

The variables PACELINE_… take precedence: launchers set them for the tasks that they start.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.config.role_names import WORDS, kind_of, of_rank, parsed, role_of_task, written
from paceline.errors import UnknownName, UsageError
from paceline.network.cluster import addresses, detect, torchrun_store
from paceline.network.cluster.description import Cluster, address
from paceline.network.cluster.sources import torchrun
from paceline.runs import atomic_files

Where = tuple[str, int]


@dataclass(frozen=True)
class Assignment:
    """The roles of this process in a run on several nodes: one, or all of a node."""

    source: str
    roles: tuple[str, ...]  # as runs number them: chief, worker:1, server:0, evaluator
    workers: int  # of the run, including the chief
    servers: int
    evaluator: bool
    hub: tuple[str, int | None] | None = None  # host and port of the hub, as far as they are known
    meet: Path | None = None  # the file into which the hub writes its address
    store: bool = False  # the hub writes its address into torchrun's store
    one_host: bool = False
    hosts: frozenset[str] = frozenset()  # of all tasks, as far as they are known
    port: int | None = None  # of this task, where the cluster names one
    alone: bool = False  # the cluster has only this task: everything runs on this machine, with one worker

    @property
    def chief(self) -> bool:
        return "chief" in self.roles

    def find(self, environment: Mapping[str, str]) -> Where | None:
        """The address of the hub; None: not known yet."""
        if self.hub is not None and self.hub[1]:
            return self.hub[0], self.hub[1]
        if self.meet is not None:
            with contextlib.suppress(OSError, UsageError):
                host, port = address(self.meet.read_text(encoding="ascii").strip(), str(self.meet))
                return (host, port) if port else None
        elif self.store:
            with contextlib.suppress(TimeoutError):
                host, port = address(torchrun_store.wait(environment, 5.0), torchrun_store.NAME)
                return (host, port) if port else None
        return None

    def announce(self, where: Where, environment: Mapping[str, str], say: Callable[[str], None]) -> None:
        """Publish the address of the hub for the other tasks."""
        host = f"[{where[0]}]" if ":" in where[0] else where[0]
        text = f"{host}:{where[1]}"
        if environment.get("PACELINE_TELL_HUB"):
            say(f"hub: {text}")
        if self.meet is not None:
            self.meet.parent.mkdir(parents=True, exist_ok=True)
            atomic_files.write_bytes(self.meet, text.encode(), private=True)
        elif self.store and not (self.hub and self.hub[1]):
            torchrun_store.publish(environment, text)

    def withdraw(self) -> None:
        """Remove the published address: the hub has ended."""
        if self.meet is not None:
            self.meet.unlink(missing_ok=True)

    def listen(self, interface: str | None, infiniband: bool, environment: Mapping[str, str]) -> Where:
        """The address and port that the hub listens on."""
        port = (self.hub[1] if self.hub is not None else None) or 0
        if given := environment.get("PACELINE_ADDRESS"):
            return _resolved(given), port
        if interface is None and self.hub is not None:
            host = _resolved(self.hub[0])
            # a host may resolve its own name to a loopback address, which is of no use to others
            misleading = ipaddress.ip_address(host).is_loopback and any(_elsewhere(one) for one in self.hosts)
            if not misleading and _is_own(host):
                return host, port
        known = addresses.interfaces()
        return addresses.own_address(known, interface, infiniband=infiniband, one_host=self.one_host), port

    def own(self, hub: Where, interface: str | None, infiniband: bool, environment: Mapping[str, str]) -> str:
        """The address at which other nodes reach this one: by default, that of the route to the hub."""
        if given := environment.get("PACELINE_ADDRESS"):
            return _resolved(given)
        if interface is not None or not infiniband:
            known = addresses.interfaces()
            return addresses.own_address(known, interface, infiniband=infiniband, one_host=self.one_host)
        family, *_, place = socket.getaddrinfo(*hub, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])


def told(environment: Mapping[str, str]) -> Assignment | None:
    """The assignment of PACELINE_TASK, or of PACELINE_TASKS and the number of this process; None: neither is set."""
    name = environment.get("PACELINE_TASK")
    tasks = [one for one in environment.get("PACELINE_TASKS", "").split(",") if one]
    ranks = torchrun.SOURCE.seen(environment) if tasks else None
    if name is None and tasks:
        name = ",".join(_share(tasks, environment, ranks))
    if name is None:
        return None
    roles = tuple(role_of_task(*parsed(one, "PACELINE_TASK: no task")) for one in name.split(","))
    counts = _counts(environment.get("PACELINE_CLUSTER"), tasks)
    if "chief" in roles and not counts:
        raise UsageError("PACELINE_CLUSTER is missing: the chief must know its tasks (chief=1,worker=2,server=1)")
    hub: tuple[str, int | None] | None = None
    if given := environment.get("PACELINE_HUB"):
        host, colon, port = given.rpartition(":")
        any_port = colon and port == "0"
        hub = (host.strip("[]"), None) if any_port else address(given, "PACELINE_HUB")
    meet = environment.get("PACELINE_MEET")
    store = ranks is not None and torchrun_store.present(environment)
    if ranks is not None and hub is None and not store and ranks.chief.host is not None:
        hub = (ranks.chief.host, ranks.chief.port)  # torchrun has reserved a port for rank 0, which is the chief
    if hub is None and meet is None and not store and "chief" not in roles:
        raise UsageError("PACELINE_HUB (host:port) or PACELINE_MEET (a file) is missing: where is the hub of this run?")
    return Assignment(
        "PACELINE_TASK",
        roles,
        counts.get("chief", 0) + counts.get("worker", 0),
        counts.get("server", 0),
        bool(counts.get("evaluator")),
        hub,
        Path(meet) if meet else None,
        store,
        ranks is not None and ranks.one_host,
    )


def _share(tasks: list[str], environment: Mapping[str, str], ranks: Cluster | None) -> list[str]:
    """The tasks of this process: a pod has one; torchrun's ranks share all tasks, also while nodes are missing."""
    index = environment.get("JOB_COMPLETION_INDEX", "")
    if index.isdigit() and int(index) < len(tasks):
        return [tasks[int(index)]]
    if not index and ranks is not None and ranks.me is not None and ranks.me.index < len(tasks):
        return tasks[ranks.me.index :: len(ranks.tasks)]
    told = f"JOB_COMPLETION_INDEX is {index or 'not set'}"
    if ranks is not None and ranks.me:
        told = f"RANK is {ranks.me.index}"
    raise UsageError(f"PACELINE_TASKS names {len(tasks)} tasks, and {told}; it says which of them this process is")


def _counts(text: str | None, tasks: list[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for task in tasks:
        kind = WORDS.get(kind_of(task), "")
        found[kind] = found.get(kind, 0) + 1
    for part in (text or "").split(","):
        kind, equals, number = part.partition("=")
        if not part:
            continue
        if kind not in WORDS:
            raise UnknownName("kind of task in PACELINE_CLUSTER", kind, WORDS)
        if not equals or not number.isdigit():
            raise UsageError(f"PACELINE_CLUSTER: {part!r} is not KIND=NUMBER")
        found[WORDS[kind]] = int(number)
    return found


def in_cluster(cluster: Cluster, environment: Mapping[str, str], meet: Path | None) -> Assignment | None:
    """The assignment of this process in a cluster; None: it is no task of it."""
    if cluster.me is None:
        return None
    chief, rank = cluster.chief, cluster.rank(cluster.me)  # where no chief is named, worker 0 has rank 0
    hub = (chief.host, chief.port) if chief.host is not None else None
    store = torchrun_store.present(environment)
    if (given := environment.get("PACELINE_MEET")) is not None:
        meet = Path(given)
        hub = (hub[0], None) if hub is not None else None  # not the engine's port, which may be in use
    elif store:
        meet = None  # nodes need not share a directory
    if not (hub and hub[1]) and meet is None and not store:
        meet = _common_file(environment)
    return Assignment(
        cluster.source,
        (written(cluster.me.kind, cluster.me.index) if rank is None else of_rank(rank),),
        len(cluster.training),
        len(cluster.of("server")),
        bool(cluster.of("evaluator")),
        hub,
        None if hub and hub[1] else meet,
        store,
        cluster.one_host,
        frozenset(task.host for task in cluster.tasks if task.host is not None),
        cluster.me.port,
    )


def _common_file(environment: Mapping[str, str]) -> Path:
    """A file with the same name in all tasks of a job, below the directory in which they were started."""
    name = next((job for engine in detect.engines() if (job := engine.job(environment)) is not None), None)
    if name is None:
        raise UsageError(
            "the tasks of this run have no way to find the chief: give --dir, a directory that all of them share, or "
            "set PACELINE_HUB=host:port"
        )
    return Path("runs").absolute() / f".hub-{name}"


def _resolved(host: str) -> str:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"the host {host!r} is not known here: {error.strerror or error}") from error
    return str(sorted(found, key=lambda one: one[0] != socket.AF_INET)[0][4][0])


def _elsewhere(host: str) -> bool:
    """Whether a host has an address here that is not a loopback address."""
    try:
        return not ipaddress.ip_address(_resolved(host)).is_loopback
    except UsageError:
        return True


def _is_own(host: str) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True
