"""Options of `paceline train` on several machines: be a task of a cluster, or have a launcher start the tasks."""

import os
import shutil
import sys
from pathlib import Path

from paceline.cli.commands import TrainOptions
from paceline.cli.console import say
from paceline.cli.options import ClusterTaskOptions
from paceline.config import discovery
from paceline.config.endpoint import PORTS, Ports
from paceline.config.plan import Plan
from paceline.config.role_names import WORDS, kind_of, task_of_role
from paceline.errors import UsageError
from paceline.launcher import Job
from paceline.network.cluster import detect, host_lists
from paceline.network.cluster.description import Cluster
from paceline.network.secure import secret as secrets
from paceline.processes.roles.roles import roles_of
from paceline.scheme import Scheme


def described(asked: ClusterTaskOptions, file: Path | None, option: str = "--cluster") -> Cluster | None:
    """The cluster that the options describe; without such options, the one that the environment shows."""
    lists = (asked.worker_hosts, asked.ps_hosts, asked.chief_hosts, asked.evaluator_hosts)
    if file is not None and any(lists):
        raise UsageError(f"{option} and lists of hosts both describe the cluster; give one of them")
    if file is not None:
        return host_lists.read(file, asked.job_name, asked.task_index)
    if any(lists):
        return host_lists.listed(*lists, asked.job_name, asked.task_index)
    if asked.job_name is not None or asked.task_index is not None:
        raise UsageError(f"--job-name and --task-index go with lists of hosts or {option}")
    return detect.seen(os.environ)


def fixed_ports(text: str | None, several: bool) -> Ports | None:
    """The range of `--ports`. `several`: the run has tasks of other commands, which connect to it."""
    if text is None:
        return None
    if not several:
        alone = "this run is one command on one machine and listens on no port"
        raise UsageError(f"{PORTS} is for runs whose processes are started one by one or by --on ENGINE; {alone}")
    return Ports.parse(text)


def typed_on_every_node(engine: str, options: list[str]) -> bool:
    """Whether the user types this very command on several nodes."""
    return discovery.launcher(engine).typed_on_every_node(_pairs(options))


def _pairs(options: list[str]) -> dict[str, str]:
    found = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key:
            raise UsageError(f"--engine {option}: write KEY=VALUE")
        found[key] = value
    return found


def submit(asked: TrainOptions, plan: Plan, scheme: Scheme, ports: Ports | None) -> int:
    """Have a launcher start the tasks of a run. Returns the exit code."""
    launcher, pairs, by, dry = discovery.launcher(asked.on or ""), _pairs(asked.engine), asked.placement, asked.dry_run
    if by is not None and "," not in by:  # a policy: only the engine knows which tasks share a node
        pairs.setdefault("placement", by)
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
    try:
        launcher.check(job)
        if dry:
            sys.stdout.write(launcher.shown(job))
            return 0
        return launcher.launch(job)
    except UsageError:  # nothing was started: an empty run directory is removed
        if not dry and not any(one.is_file() for one in directory.rglob("*")):
            shutil.rmtree(directory, ignore_errors=True)
        raise


def task_command(plan: Plan, directory: Path) -> tuple[str, ...]:
    """The command of every task: the one that was given, without the options of the launcher."""
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
    names = [task_of_role(role.kind, role.index) for role in roles_of(plan, scheme)]
    if by is None or "," not in by:
        return tuple(names)
    waiting: dict[str, list[str]] = {}
    for name in names:
        waiting.setdefault(kind_of(name), []).append(name)
    found = []
    unnamed = "chief" not in [word.strip() for word in by.split(",")]
    for word in by.split(","):
        kind = WORDS.get(word.strip(), "")
        if kind == "worker" and unnamed and waiting.get("chief"):
            kind = "chief"  # the first worker becomes the chief
        if not waiting.get(kind):
            raise UsageError(f"--placement has more {word.strip()}s than this run: {', '.join(names)}")
        found.append(waiting[kind].pop(0))
    if len(found) != len(names):
        raise UsageError(f"--placement names {len(found)} tasks, the run has {len(names)}, which is larger")
    return tuple(found)
