"""`paceline train` past one machine: take part in a cluster as hub or agent, or hand the run to an engine."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cluster import addresses, detect, hosts, placement, toml, torchrun
from paceline.cluster.description import KINDS, Cluster, Task
from paceline.cluster.engaged import Engaged, in_cluster, role_of, told
from paceline.errors import UnknownName, UsageError
from paceline.launchers import agent
from paceline.launchers.hub import Hub
from paceline.launchers.job import Job
from paceline.launchers.local import Launcher
from paceline.launchers.way import Way
from paceline.net import secret as secrets
from paceline.net import tls
from paceline.net.tls import Certificates
from paceline.plan import Plan
from paceline.role import crew
from paceline.scheme import Scheme
from paceline.stage import Node

ENGINES = ("slurm", "ray", "spark", "mpi", "torchrun", "kubernetes", "hosts")
JOIN = 600.0  # seconds

On = Annotated[str | None, typer.Option("--on", help=f"Have it run by {', '.join(ENGINES)}.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="With --on: print what would be submitted.")]
EngineOptions = Annotated[
    list[str] | None, typer.Option("--engine", help="KEY=VALUE for the engine: partition=long, nodes=4, image=…")
]
WorkerHosts = Annotated[str, typer.Option(help="host:port,host:port,…: this process is one of a cluster.")]
PsHosts = Annotated[str, typer.Option("--ps-hosts", "--server-hosts", help="Of the servers, the same way.")]
ChiefHosts = Annotated[str, typer.Option(help="Of the chief; left away, worker 0 is the chief.")]
JobName = Annotated[str | None, typer.Option(help="What this process is: chief, worker, ps or evaluator.")]
TaskIndex = Annotated[int | None, typer.Option(help="Its number among those of that job.")]
ClusterFile = Annotated[Path | None, typer.Option("--cluster", help="A TOML file that describes the cluster.")]
By = Annotated[
    str | None, typer.Option("--placement", help="Roles of numbered tasks: ps,worker,… or pack, spread, ps-per-node.")
]
InterfaceOption = Annotated[str | None, typer.Option(help="By name (ib0) or subnet (10.1.0.0/16).")]
NoIb = Annotated[bool, typer.Option("--no-ib", help="Take no InfiniBand interface.")]
AddressRule = Annotated[str | None, typer.Option(help="From host name to address: file.py:function.")]
Join = Annotated[float | None, typer.Option(help="Seconds to wait for the others. Default: 600.")]
Apart = Annotated[
    bool, typer.Option("--apart", help="Use connections also among processes of one host, not its shared memory.")
]
Tls = Annotated[
    str | None,
    typer.Option(help="Encrypt: CERTIFICATE,KEY[,AUTHORITY] in PEM, or `generated` (made in a directory all see)."),
]


@dataclass(frozen=True)
class Network:
    """How this process is reached, as the options say."""

    interface: str | None = None
    infiniband: bool = True
    join: float = JOIN
    tls: str | None = None
    share: bool = True


def described(
    lists: tuple[str, str, str, str], job_name: str | None, task_index: int | None, file: Path | None
) -> Cluster | None:
    """What was asked for by options; without any, what the environment shows."""
    if file is not None and any(lists):
        raise UsageError("a file and lists of hosts describe the cluster both; give one of them")
    if file is not None:
        return toml.read(file, job_name, task_index)
    if any(lists):
        return hosts.listed(*lists, job_name, task_index)
    if job_name is not None or task_index is not None:
        raise UsageError("--job-name and --task-index go with lists of hosts or a file")
    return detect.seen(os.environ)


def engaged(
    found: Callable[[], Cluster | None], by: str | None, servers: int | None, rule: str | None, directory: str | None
) -> Engaged | None:
    """What this process is in its cluster; None: it is alone, and launches everything itself."""
    direct = told(os.environ)
    if direct is not None:
        return direct
    cluster = found()
    if cluster is None:
        if by is not None:
            raise UsageError("--placement needs the tasks of an engine; there is no cluster in the environment")
        return None
    by = by or os.environ.get("PACELINE_PLACEMENT")
    if not cluster.by_role and cluster.me is not None:
        if by is None:
            by = "pack" if servers is None or servers > 0 else ",".join(["worker"] * len(cluster.tasks))
        if cluster.source == torchrun.NAME and len(by.split(",")) > len(cluster.tasks):
            whole, roles = _shared_out(cluster, by)
            found_there = in_cluster(whole, os.environ, _meeting_file(directory))
            return replace(found_there, roles=roles) if found_there is not None else None
        cluster = _placed(cluster, by, servers)
    elif by is not None and cluster.me is not None:
        raise UsageError(f"{cluster.source} names the role of every task; --placement is for engines that do not")
    if rule is not None:
        cluster = addresses.called(cluster, addresses.site_rule(rule))
    return in_cluster(cluster, os.environ, _meeting_file(directory))


def _meeting_file(directory: str | None) -> Path | None:
    return Path(directory).absolute() / "hub" if directory is not None else None


def _placed(cluster: Cluster, by: str, servers: int | None) -> Cluster:
    """By seats; where an engine does not tell who shares a node, a list of roles goes by rank."""
    if cluster.seats or "," not in by:
        return placement.placed(cluster, by, servers if "," not in by else None)
    listed = _listed(by, [(task.host, task.port) for task in cluster.tasks])
    me = listed[cluster.tasks.index(cluster.me)] if cluster.me is not None else None
    return replace(cluster, tasks=tuple(sorted(listed, key=_in_order)), me=me, by_role=True)


def _in_order(task: Task) -> tuple[int, int]:
    return KINDS.index(task.kind), task.index


def _listed(by: str, known: list[tuple[str | None, int | None]]) -> list[Task]:
    """The tasks of a list of roles, one for each place that is known."""
    kinds = placement.roles([(0, number) for number in range(len(known))], by)
    counts: dict[str, int] = {}
    tasks = []
    for number, where in enumerate(known):
        kind = kinds[0, number]
        tasks.append(Task(kind, counts.get(kind, 0), *where))
        counts[kind] = counts.get(kind, 0) + 1
    return tasks


def _shared_out(cluster: Cluster, by: str) -> tuple[Cluster, tuple[str, ...]]:
    """An elastic engine may have started fewer processes than there are roles: each takes several."""
    assert cluster.me is not None
    rank, there = cluster.tasks.index(cluster.me), len(cluster.tasks)
    listed = _listed(by, [(None, None)] * len(by.split(",")))
    whole = replace(cluster, tasks=tuple(sorted(listed, key=_in_order)), me=listed[rank], by_role=True, seats=())
    return whole, tuple(role_of(whole, task) for task in listed[rank::there])


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
    if text == "generated":
        if directory is None:
            raise UsageError("--tls generated keeps its certificate in the run directory: give --dir, seen by all")
        return tls.generated(Path(directory))
    parts = [Path(part) for part in text.split(",")]
    if not 2 <= len(parts) <= 3:
        raise UsageError("--tls: write CERTIFICATE,KEY or CERTIFICATE,KEY,AUTHORITY, or generated")
    return Certificates(parts[0], parts[1], parts[2] if len(parts) > 2 else None)


def take_part(given: Engaged, network: Network, directory: str | None, say: Callable[[str], None]) -> int:
    """Be an agent: one role of a run whose hub is another process. Gives the exit code."""
    secret, certificates = secret_of(directory), certificates_of(network.tls, directory)

    def way() -> Way | None:
        hub = given.find(os.environ)
        if hub is None:
            return None
        own = given.own(hub, network.interface, network.infiniband, os.environ)
        return Way(*hub, given.roles, Node(0, own, secret, certificates, network.share))

    return agent.serve(way, network.join, say)


def hub_of(given: Engaged, network: Network, directory: str, say: Callable[[str], None]) -> Callable[..., Launcher]:
    """What makes the launcher of a run whose chief this process has."""
    address, port = given.listen(network.interface, network.infiniband, os.environ)
    certificates = certificates_of(network.tls, directory)
    node = Node(0, address, secret_of(directory), certificates, network.share)

    def listening(host: str, chosen: int) -> None:
        given.announce((host, chosen), os.environ, say)

    def make(plan: Plan, scheme: Scheme, objects: dict[str, Any], **rest: Any) -> Launcher:
        return Hub(
            plan,
            scheme,
            objects,
            node=node,
            port=port,
            here=set(given.roles),
            join=network.join,
            listening=listening,
            **rest,
        )

    return make


def counted(given: Engaged, settings: dict[str, Any], scheme: Scheme) -> dict[str, Any]:
    """The settings of a run whose cluster says how many of each there are."""
    for name, there in (("workers", given.workers), ("servers", given.servers)):
        if (
            settings.get(name) is not None
            and settings[name] != there
            and not (name == "servers" and not scheme.methods)
        ):
            raise UsageError(f"--{name} {settings[name]}, but {given.source} has {there}; leave --{name} away")
    if scheme.methods and not given.servers:
        raise UsageError(f"{scheme.name} needs a server, and {given.source} has none: make one task a ps")
    found = settings | {"workers": given.workers, "servers": given.servers if scheme.methods else 0}
    return found | ({"evaluator": True} if given.evaluator else {})


def submit(
    engine: str, plan: Plan, scheme: Scheme, options: list[str], by: str | None, dry: bool, say: Callable[[str], None]
) -> int:
    """Hand a run to an engine; gives the exit code."""
    if engine not in ENGINES:
        raise UnknownName("engine", engine, ENGINES)
    pairs = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key:
            raise UsageError(f"--engine {option}: write KEY=VALUE")
        pairs[key] = value
    if by is not None and "," not in by:  # which tasks share a node is for the engine to say
        pairs.setdefault("placement", by)
    module = importlib.import_module(f"paceline.launchers.{engine}")
    directory = Path(plan.directory)
    job = Job(
        command=task_command(plan, directory),
        tasks=ordered(plan, scheme, by),
        directory=directory,
        name=directory.name,
        options=pairs,
        threads=plan.threads,
        gpus=0 if plan.device == "cpu" else 1,
        secret=secrets.fresh(),
        say=say,
    )
    if dry:
        sys.stdout.write(module.shown(job))
        return 0
    return int(module.launch(job))


def task_command(plan: Plan, directory: Path) -> tuple[str, ...]:
    """What every task runs: the command that was given, without what was meant for the engine."""
    arguments, kept = sys.argv[1:], ["paceline"]
    skipped = {"--on": 1, "--engine": 1, "--dry-run": 0, "--dir": 1, "--placement": 1, "--plain": 0}
    at = 0
    while at < len(arguments):
        name, equals, _ = arguments[at].partition("=")
        if name in skipped:
            at += 1 + (0 if equals else skipped[name])
            continue
        kept.append(arguments[at])
        at += 1
    return (*kept, "--dir", str(directory), "--plain")


def ordered(plan: Plan, scheme: Scheme, by: str | None) -> tuple[str, ...]:
    """The tasks in the order in which an engine numbers them: by a list of roles, else chief, workers, servers."""
    parts = [str(part) for part in crew(plan, scheme)]
    names = [name if not name.startswith("worker") else f"worker:{int(name.split(':')[1]) - 1}" for name in parts]
    if by is None or "," not in by:
        return tuple(names)
    waiting: dict[str, list[str]] = {}
    for name in names:
        waiting.setdefault(name.partition(":")[0], []).append(name)
    found = []
    for word in by.split(","):
        kind = placement.WORDS.get(word.strip(), "")
        if kind == "worker" and not waiting.get("worker") and waiting.get("chief"):
            kind = "chief"
        if not waiting.get(kind):
            raise UsageError(f"--placement has more {word.strip()}s than this run: {', '.join(names)}")
        found.append(waiting[kind].pop(0))
    if len(found) != len(names):
        raise UsageError(f"--placement names {len(found)} tasks, the run has {len(names)}, which is larger")
    return tuple(found)
