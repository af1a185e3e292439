"""`paceline train` past one machine: take part in a cluster as hub or agent, or hand the run to an engine."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from paceline.config.plan import Plan
from paceline.config.ports import OPTION, Ports
from paceline.errors import UnknownName, UsageError
from paceline.launcher import Job
from paceline.network.cluster import cluster_file, detect, host_lists, placement
from paceline.network.cluster.description import Cluster
from paceline.network.secure import secret as secrets
from paceline.processes.roles.main import roles_of
from paceline.scheme import Scheme

ENGINES = ("slurm", "ray", "spark", "mpi", "torchrun", "kubernetes", "hosts")

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
Join = Annotated[float | None, typer.Option(help="Seconds to wait for the others at the start. Default: 600.")]
JoinPolicy = Annotated[
    str | None,
    typer.Option(help="When somebody has not joined by then: fail, go-on (without them), or wait. Default: fail."),
]
Apart = Annotated[
    bool, typer.Option("--apart", help="Use connections also among processes of one host, not its shared memory.")
]
PortRange = Annotated[
    str | None, typer.Option("--ports", help="FIRST-LAST: every listener takes one of these. Default: any free port.")
]
Tls = Annotated[
    str | None,
    typer.Option(help="Encrypt: CERTIFICATE,KEY[,AUTHORITY] in PEM, or `generated` (made in a directory all see)."),
]


def described(
    lists: tuple[str, str, str, str],
    job_name: str | None,
    task_index: int | None,
    file: Path | None,
    option: str = "--cluster",
) -> Cluster | None:
    """What was asked for by options; without any, what the environment shows."""
    if file is not None and any(lists):
        raise UsageError(f"{option} and lists of hosts describe the cluster both; give one of them")
    if file is not None:
        return cluster_file.read(file, job_name, task_index)
    if any(lists):
        return host_lists.listed(*lists, job_name, task_index)
    if job_name is not None or task_index is not None:
        raise UsageError(f"--job-name and --task-index go with lists of hosts or {option}")
    return detect.seen(os.environ)


def fixed_ports(text: str | None, several: bool) -> Ports | None:
    """The range of `--ports`. `several`: the run has other processes to listen for."""
    if text is None:
        return None
    if not several:
        raise UsageError(
            f"{OPTION} is for runs whose processes are started one by one or by --on ENGINE; this run is one command "
            "on one machine and listens for nobody else"
        )
    return Ports.parse(text)


def known(engine: str) -> None:
    """Refuse an engine that there is not, before anything is made for it."""
    if engine not in ENGINES:
        raise UnknownName("engine", engine, ENGINES)


def submit(
    engine: str,
    plan: Plan,
    scheme: Scheme,
    options: list[str],
    by: str | None,
    dry: bool,
    say: Callable[[str], None],
    ports: Ports | None = None,
) -> int:
    """Hand a run to an engine; gives the exit code."""
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
        evaluator_gpus=0 if plan.eval_device in ("", "cpu") else 1,
        secret=secrets.fresh(),
        say=say,
        ports=None if ports is None else (ports.first, ports.last),
    )
    if dry:
        sys.stdout.write(module.shown(job))
        return 0
    try:
        return int(module.launch(job))
    except UsageError:  # nothing was started: the directory that was made for it goes, if nothing is in it
        if not any(one.is_file() for one in directory.rglob("*")):
            shutil.rmtree(directory, ignore_errors=True)
        raise


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
    parts = [str(part) for part in roles_of(plan, scheme)]
    names = [name if not name.startswith("worker") else f"worker:{int(name.split(':')[1]) - 1}" for name in parts]
    if by is None or "," not in by:
        return tuple(names)
    waiting: dict[str, list[str]] = {}
    for name in names:
        waiting.setdefault(name.partition(":")[0], []).append(name)
    found = []
    unnamed = "chief" not in [word.strip() for word in by.split(",")]
    for word in by.split(","):
        kind = placement.WORDS.get(word.strip(), "")
        if kind == "worker" and unnamed and waiting.get("chief"):
            kind = "chief"  # the first worker is
        if not waiting.get(kind):
            raise UsageError(f"--placement has more {word.strip()}s than this run: {', '.join(names)}")
        found.append(waiting[kind].pop(0))
    if len(found) != len(names):
        raise UsageError(f"--placement names {len(found)} tasks, the run has {len(names)}, which is larger")
    return tuple(found)
