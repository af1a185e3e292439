"""`paceline cluster`: shows the cluster that this process belongs to."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.cli import cluster_options as options
from paceline.errors import UsageError
from paceline.network.cluster import addresses, detect, placement
from paceline.network.cluster.description import Cluster, ClusterTask
from paceline.runs.atomic_files import finite

screen = Console(highlight=False)

LOCAL = "local: no cluster in the environment"


def cluster(
    worker_hosts: options.WorkerHosts = "",
    ps_hosts: options.PsHosts = "",
    chief_hosts: options.ChiefHosts = "",
    evaluator_hosts: options.EvaluatorHosts = "",
    job_name: options.JobName = None,
    task_index: options.TaskIndex = None,
    file: Annotated[Path | None, typer.Option(help="A TOML file that describes the cluster.")] = None,
    by: options.By = None,
    servers: Annotated[int | None, typer.Option("--servers", "--ps", help="With pack and spread. Default: 1.")] = None,
    interface: options.InterfaceOption = None,
    no_ib: options.NoIb = False,
    address_rule: options.AddressRule = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of the table.")] = False,
) -> None:
    """The cluster of this process, from its environment, lists of hosts or a file: tasks, roles, addresses."""
    lists = (worker_hosts, ps_hosts, chief_hosts, evaluator_hosts)
    found = options.described(lists, job_name, task_index, file, "--file")
    if servers is not None and by is None:
        raise UsageError("--servers goes with --placement")
    if by is not None:
        if found is None:
            raise UsageError("--placement needs the tasks of an engine; there is no cluster in the environment")
        found = placement.placed(found, by, servers)
    if found is not None and address_rule is not None:
        found = addresses.called(found, addresses.site_rule(address_rule))
    listen, note = _listen(found, interface, no_ib)
    if found is not None and note:
        found = detect.noted(found, note)
    if as_json:
        sys.stdout.write(json.dumps(finite(_plain(found, listen)), allow_nan=False) + "\n")
    else:
        _show(found, listen)


def _listen(found: Cluster | None, interface: str | None, no_ib: bool) -> tuple[str, str]:
    """The address of this host. An undecided one is an error only if an interface was asked for; else a note."""
    alone = found is None or found.one_host
    try:
        known = addresses.interfaces()
        return addresses.own_address(known, interface, infiniband=not no_ib, one_host=alone), ""
    except UsageError as error:
        if interface is not None or no_ib:
            raise
        return "", str(error)


def _plain(found: Cluster | None, listen: str) -> dict[str, Any]:
    if found is None:
        return {"source": None, "complete": True, "me": None, "chief": None, "tasks": [], "listen": listen}
    tasks = [
        {"task": str(task), "role": found.role(task), "rank": rank, "host": task.host, "port": task.port}
        for task, rank in _ranked(found)
    ]
    return {
        "source": found.source,
        "complete": found.complete,
        "me": None if found.me is None else str(found.me),
        "chief": str(found.chief),
        "tasks": tasks,
        "meeting": found.meeting,
        "listen": listen or None,
        "missing": list(found.missing),
        "notes": list(found.notes),
    }


def _ranked(found: Cluster) -> list[tuple[ClusterTask, int | None]]:
    ranks = {task: rank for rank, task in enumerate(found.training)}
    return [(task, ranks.get(task)) for task in found.tasks]


def _show(found: Cluster | None, listen: str) -> None:
    if found is None:
        _say(LOCAL)
        return
    _say(f"source: {found.source}")
    table = Table(title_justify="left")
    for column in ("task", "role", "host", "port", ""):
        table.add_column(column, overflow="fold")
    outside = [found.me] if found.me is not None and found.me not in found.tasks else []
    for task in (*found.tasks, *outside):
        port = "?" if task.port is None else str(task.port)
        host = "?" if task.host is None else task.host
        if task.kind == "evaluator":  # needs no address
            host, port = task.host or "", str(task.port or "")
        table.add_row(str(task), found.role(task), escape(host), port, "this process" if task == found.me else "")
    screen.print(table)
    if found.me is None:
        _say("this process: none of them")
    if listen:
        _say(f"address of this host: {listen}")
    if found.meeting:
        _say(f"meeting point: {found.meeting}")
    for text in found.missing:
        _say(f"missing: {text}")
    for text in found.notes:
        _say(f"note: {text}")


def _say(text: str) -> None:
    screen.print(escape(text), soft_wrap=True)
