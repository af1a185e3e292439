"""The description of a cluster, from any source: tasks with kind, index and address, and the task of this process."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from functools import cached_property

from paceline.config.role_names import SINGLE
from paceline.errors import UsageError

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?")


@dataclass(frozen=True)
class ClusterTask:
    """One process of a cluster. A host or port of None is not known yet."""

    kind: str
    index: int
    host: str | None = None
    port: int | None = None

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


@dataclass(frozen=True, order=True)
class Slot:
    """The slot of a task: its node and its number on that node, independent of ranks."""

    node: int
    local: int
    host: str | None = None
    port: int | None = None


@dataclass(frozen=True)
class Cluster:
    """The tasks of a run, and the source of the description. Where no chief is named, worker 0 is the chief."""

    source: str
    tasks: tuple[ClusterTask, ...]
    me: ClusterTask | None = None  # an evaluator may be outside of `tasks`; None: this process is no task
    by_role: bool = True  # False: an engine only numbers its tasks; all are workers until a placement assigns roles
    seats: tuple[Slot, ...] = ()  # the slots of all tasks, where the engine tells them: placements use them
    seat: Slot | None = None  # the slot of this process
    meeting: str | None = None  # an address that every task knows, for a rendezvous
    notes: tuple[str, ...] = ()  # for the user, such as which variables were ignored

    def __post_init__(self) -> None:
        if not self.training:
            raise UsageError(f"{self.source}: the cluster has neither a chief nor a worker")
        for kind in SINGLE:
            if len(self.of(kind)) > 1:
                raise UsageError(f"{self.source}: there can be one {kind}, not {len(self.of(kind))}")
        seen: dict[tuple[str, int], ClusterTask] = {}
        for task in self.tasks:
            if task.host is not None and task.port is not None:
                other = seen.setdefault((same(task.host), task.port), task)
                if other is not task:
                    raise UsageError(f"{self.source}: {other} and {task} have the same address {shown(task)}")

    def of(self, kind: str) -> tuple[ClusterTask, ...]:
        """The tasks of one kind, in the order of their index."""
        return tuple(task for task in self.tasks if task.kind == kind)

    @cached_property
    def chief(self) -> ClusterTask:
        return self.training[0]

    @property
    def training(self) -> tuple[ClusterTask, ...]:
        """The chief and the workers, in the order of their ranks."""
        return self.of("chief") + self.of("worker")

    def rank(self, task: ClusterTask) -> int | None:
        """The rank of a task among those that train; None for servers and the evaluator."""
        return self.training.index(task) if task in self.training else None

    def role(self, task: ClusterTask) -> str:
        """The kind of a task; `chief` for worker 0 where no chief is named."""
        return "chief" if task == self.chief else task.kind

    @property
    def incomplete(self) -> tuple[ClusterTask, ...]:
        """The tasks whose address is not complete. The evaluator needs none."""
        return tuple(one for one in self.tasks if one.kind != "evaluator" and None in (one.host, one.port))

    @property
    def complete(self) -> bool:
        return not self.incomplete

    @property
    def missing(self) -> tuple[str, ...]:
        """What is still unknown, as sentences for the user."""
        hosts = [str(task) for task in self.incomplete if task.host is None]
        ports = [str(task) for task in self.incomplete if task.port is None]
        told = []
        if hosts:
            told.append(f"hosts of {_some(hosts)}: where they run is not told and must be exchanged by rendezvous")
        if ports:
            told.append(f"ports of {_some(ports)}: each has to choose one and to tell the others")
        return tuple(told)

    @property
    def one_host(self) -> bool:
        """Whether all tasks are known to be on one host."""
        hosts = {task.host and same(task.host) for task in self.tasks}
        return len(hosts) == 1 and None not in hosts


def address(text: object, where: str) -> tuple[str, int | None]:
    """Host and port of `host`, `host:port` or `[v6]:port`. `where`: the source of the text, for the error."""
    if not isinstance(text, str):
        raise UsageError(f'{where}: {text!r} is not an address; write it as "host:port"')
    host, port = _parted(text)
    if not is_host(host):
        raise UsageError(f"{where}: {text!r} is not an address; write host:port, or [address]:port for IPv6")
    if port is None:
        return host, None
    if not (port.isascii() and port.isdigit() and len(port) < 6 and 1 <= int(port) <= 65535):
        raise UsageError(f"{where}: the port of {text!r} must be a number from 1 to 65535")
    return host, int(port)


def is_host(text: str) -> bool:
    """Whether this can be a host name or an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        labels = text.removesuffix(".").split(".")
        numeric = labels[-1].isdigit()  # an IP address with a typing error
        return len(text) < 254 and not numeric and all(_LABEL.fullmatch(label) for label in labels)
    return True


def shown(task: ClusterTask) -> str:
    """The address of a task as text, with ? for an unknown part."""
    host = task.host if task.host is not None else "?"
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{task.port if task.port is not None else '?'}"


def numbered(kind: str, addresses: list[tuple[str, int | None]]) -> list[ClusterTask]:
    """The tasks of one kind, from a list of their addresses."""
    return [ClusterTask(kind, index, host, port) for index, (host, port) in enumerate(addresses)]


def same(host: str) -> str:
    """The normal form of a host: lower case, and loopback for localhost."""
    plain = host.lower().removesuffix(".")
    return "127.0.0.1" if plain == "localhost" else plain


def _parted(text: str) -> tuple[str, str | None]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or ":" not in host or (rest and not rest.startswith(":")):
            return "", None
        return host, rest[1:] if rest else None
    if text.count(":") > 1:  # an IPv6 address without brackets has no port
        return text, None
    host, colon, port = text.partition(":")
    return host, port if colon else None


def _some(names: list[str]) -> str:
    """A list of names, shortened where there are many."""
    return ", ".join(names) if len(names) < 9 else f"{', '.join(names[:7])} and {len(names) - 7:,} more"
