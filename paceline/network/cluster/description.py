"""What a cluster is, whoever describes it: tasks with kind, index and address, and which one this process is."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from functools import cached_property

from paceline.config.role_names import KINDS, SINGLE
from paceline.errors import UsageError

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?")


@dataclass(frozen=True)
class ClusterTask:
    """One process. What is not known yet, a host or a port, is None."""

    kind: str
    index: int
    host: str | None = None
    port: int | None = None

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


@dataclass(frozen=True, order=True)
class Slot:
    """A place that an engine gives to a task, by node and number on that node, whatever the ranks are."""

    node: int
    local: int
    host: str | None = None
    port: int | None = None


@dataclass(frozen=True)
class Cluster:
    """The tasks of a run, and who said so. Where no chief is named, worker 0 is the chief."""

    source: str
    tasks: tuple[ClusterTask, ...]
    me: ClusterTask | None = None  # an evaluator may be outside of `tasks`; None: this process is none of them
    by_role: bool = True  # an engine only numbers its tasks: all are workers until a placement gives them roles
    seats: tuple[Slot, ...] = ()  # where an engine tells them: a placement goes by them
    seat: Slot | None = None  # this process's own
    meeting: str | None = None  # an address that every task knows, where the rest can be exchanged
    notes: tuple[str, ...] = ()  # what a person should know of it, such as what was not read

    def __post_init__(self) -> None:
        self._check_kinds()
        self._check_addresses()
        outside = self.me is not None and self.me.kind == "evaluator" and not self.of("evaluator")
        if self.me is not None and self.me not in self.tasks and not outside:
            raise UsageError(f"{self.source}: this process is {self.me}, which is not in the cluster")
        if outside and self.me is not None and self.me.index:
            raise UsageError(f"{self.source}: this process is {self.me}; there is one evaluator, evaluator:0")

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
        """A task's number among those that train; None for a server and an evaluator."""
        return self.training.index(task) if task in self.training else None

    def role(self, task: ClusterTask) -> str:
        """What a task does: its kind, unless worker 0 is the chief."""
        return "chief" if task == self.chief else task.kind

    @property
    def incomplete(self) -> tuple[ClusterTask, ...]:
        """The tasks that nobody could call yet. Nobody calls the evaluator."""
        return tuple(
            task for task in self.tasks if task.kind != "evaluator" and (task.host is None or task.port is None)
        )

    @property
    def complete(self) -> bool:
        return not self.incomplete

    @property
    def missing(self) -> tuple[str, ...]:
        """What has to be found out before all can call each other."""
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

    def _check_kinds(self) -> None:
        for task in self.tasks:
            if task.kind not in KINDS:
                raise UsageError(f"{self.source}: no kind of task {task.kind!r}; there are: {', '.join(KINDS)}")
        if not self.training:
            raise UsageError(f"{self.source}: the cluster has neither a chief nor a worker: somebody has to train")
        for kind in KINDS:
            indices = [task.index for task in self.of(kind)]
            if indices != list(range(len(indices))):
                raise UsageError(
                    f"{self.source}: the {kind}s are numbered {_some(list(map(str, indices)))}, not from 0 without gaps"
                )
        for kind in SINGLE:
            if len(self.of(kind)) > 1:
                raise UsageError(f"{self.source}: there can be one {kind}, not {len(self.of(kind))}")

    def _check_addresses(self) -> None:
        seen: dict[tuple[str, int], ClusterTask] = {}
        for task in self.tasks:
            if task.host is not None and task.port is not None:
                other = seen.setdefault((same(task.host), task.port), task)
                if other is not task:
                    raise UsageError(f"{self.source}: {other} and {task} have the same address {shown(task)}")


def address(text: object, where: str) -> tuple[str, int | None]:
    """`host`, `host:port` or `[v6]:port` in its parts; `where` names what is wrong if it is none of them."""
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
    """A task's address as it is written; a question mark for what is not known."""
    host = task.host if task.host is not None else "?"
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{task.port if task.port is not None else '?'}"


def numbered(kind: str, addresses: list[tuple[str, int | None]]) -> list[ClusterTask]:
    """Tasks of one kind, by a list of their addresses."""
    return [ClusterTask(kind, index, host, port) for index, (host, port) in enumerate(addresses)]


def same(host: str) -> str:
    """One spelling of a host: names have no case, and localhost is loopback."""
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
    """A list that stays readable with thousands of tasks."""
    return ", ".join(names) if len(names) < 9 else f"{', '.join(names[:7])} and {len(names) - 7:,} more"
