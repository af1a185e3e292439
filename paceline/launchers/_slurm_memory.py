"""The memory that a task of a Slurm job asks for: its share of the node that holds most tasks. All amounts are in MiB.

The site's settings take precedence: its default is not overridden, its maximum is never exceeded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.errors import UsageError

# what to ask with: `sinfo -h -N -o FORMAT`, and `scontrol show partition -o`
NODES = "%N|%R|%c|%m|%Z"


@dataclass(frozen=True)
class SlurmNode:
    """The resources of a node."""

    name: str
    cpus: int
    memory: int
    threads: int = 1  # per core: Slurm allocates whole cores


@dataclass(frozen=True)
class Partition:
    """Nodes, and the site's settings of memory; None: not set."""

    name: str
    nodes: tuple[SlurmNode, ...]
    default: str | None = None  # such as DefMemPerCPU=2000
    most_per_cpu: int | None = None
    most_per_node: int | None = None


@dataclass(frozen=True)
class Request:
    """An option of sbatch (None: no option), and its reason."""

    option: str | None
    reason: str


def partition(nodes: str, partitions: str, name: str | None) -> Partition:
    """The partition of this name, or the site's default one, from the output of `sinfo` and `scontrol`."""
    fields = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in partitions.splitlines() if line.strip()]
    known = {one["PartitionName"]: one for one in fields if "PartitionName" in one}
    if name is None:
        name = next((key for key, one in known.items() if one.get("Default") == "YES"), None)
        if name is None:
            raise UsageError(
                f"Slurm has no default partition; choose one: --engine partition={'|'.join(sorted(known))}"
            )
    if name not in known:
        raise UsageError(f"Slurm has no partition {name!r}; there are: {', '.join(sorted(known)) or 'none'}")
    found = [line.split("|") for line in nodes.splitlines() if line.count("|") == 4]
    own = tuple(
        SlurmNode(node, _number(cpus) or 1, _number(memory) or 1, _number(threads) or 1)
        for node, of, cpus, memory, threads in found
        if of == name
    )
    told = known[name]
    default = next((f"{key}={told[key]}" for key in ("DefMemPerCPU", "DefMemPerNode") if _number(told.get(key))), None)
    return Partition(name, own, default, _number(told.get("MaxMemPerCPU")), _number(told.get("MaxMemPerNode")))


def share(of: Partition, tasks: int, per_node: int | None, cpus: int) -> Request:
    """The default amount. `per_node`: the most tasks on a node; None: not known."""
    if of.default is not None:
        return Request(None, f"the default of partition {of.name}, {of.default}")
    able = [node for node in of.nodes if node.cpus >= cpus * (per_node or 1)]
    if not able:
        wanted = f"{per_node or 1} tasks of {cpus} processors"
        raise UsageError(f"no node of partition {of.name} has room for {wanted}; see sinfo -p {of.name} -o '%n %c %m'")
    shares = {node.name: _share(of, node, min(tasks, per_node or node.cpus // cpus), cpus) for node in able}
    least = min(shares, key=lambda name: (shares[name], name))
    node = next(one for one in able if one.name == least)
    count = min(tasks, per_node or node.cpus // cpus)
    reason = f"{count} of them may stand on a node, and {least} has {node.memory}M"
    request = asked(shares[least], per_node, cpus, max(one.threads for one in able))
    return Request(request.option, f"{request.reason}: {reason}")


def asked(memory: int, per_node: int | None, cpus: int, threads: int = 1) -> Request:
    """`memory` for each task: per node where the number of tasks on a node is known, else per processor."""
    reason = f"{memory}M for each task"
    if per_node is not None:
        return Request(f"--mem={memory * per_node}M", reason)
    whole = -(-cpus // threads) * threads  # a core is allocated with all its threads
    return Request(f"--mem-per-cpu={max(1, memory // whole)}M", reason)


def _share(of: Partition, node: SlurmNode, count: int, cpus: int) -> int:
    limits = [node.memory // count]
    if of.most_per_node is not None:
        limits.append(of.most_per_node // count)
    if of.most_per_cpu is not None:
        limits.append(of.most_per_cpu * cpus)
    return max(1, min(limits))


def _number(text: str | None) -> int | None:
    """A number as Slurm prints it; `8000+` for several kinds of node; None: UNLIMITED or absent."""
    match = re.match(r"[0-9]+", text or "")
    return int(match[0]) or None if match else None
