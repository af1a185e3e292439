"""`paceline cluster`: shows the cluster that this process belongs to."""

from typing import Any

from rich.markup import escape
from rich.table import Table

from paceline.cli.cluster_options import described
from paceline.cli.commands import ClusterOptions
from paceline.cli.console import screen
from paceline.cli.options import print_json
from paceline.errors import UsageError
from paceline.network.cluster import addresses, detect, placement
from paceline.network.cluster.description import Cluster


def cluster(asked: ClusterOptions) -> None:
    found = described(asked, asked.file, "--file")
    if asked.servers is not None and asked.placement is None:
        raise UsageError("--servers goes with --placement")
    if asked.placement is not None:
        if found is None:
            raise UsageError("--placement needs the tasks of an engine; there is no cluster in the environment")
        found = placement.placed(found, asked.placement, asked.servers)
    if found is not None and asked.address_rule is not None:
        found = addresses.called(found, addresses.site_rule(asked.address_rule))
    listen, note = _listen(found, asked.interface, asked.no_ib)
    if found is not None and note:
        found = detect.noted(found, note)
    if asked.as_json:
        print_json(_plain(found, listen))
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
    ranks = {task: rank for rank, task in enumerate(found.training)}
    tasks = [
        {"task": str(task), "role": found.role(task), "rank": ranks.get(task), "host": task.host, "port": task.port}
        for task in found.tasks
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


def _show(found: Cluster | None, listen: str) -> None:
    if found is None:
        _say("local: no cluster in the environment")
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
    facts = [("address of this host", listen), ("meeting point", found.meeting)]
    facts += [("missing", text) for text in found.missing] + [("note", text) for text in found.notes]
    for name, text in facts:
        if text:
            _say(f"{name}: {text}")


def _say(text: str) -> None:
    screen.print(escape(text), soft_wrap=True)
