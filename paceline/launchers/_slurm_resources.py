"""The memory and the GPUs that a Slurm job requests.

Memory, in MiB: each task gets its share of the node that holds most tasks. The site's settings take precedence: its
default is not overridden, its maximum is never exceeded.

GPUs: Slurm gives every task of a step the same number. Where only some tasks use one, the job requests for each node
what the fullest node needs, and each task takes its own of the GPUs that Slurm shows to its node; a server takes none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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
            raise UsageError(f"Slurm has no default partition: give --engine partition={'|'.join(sorted(known))}")
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
    shares = []
    for node in able:
        count = min(tasks, per_node or node.cpus // cpus)
        limits = [node.memory // count]
        limits += [of.most_per_node // count] if of.most_per_node is not None else []
        limits += [of.most_per_cpu * cpus] if of.most_per_cpu is not None else []
        shares.append((max(1, min(limits)), node.name, count, node.memory))
    least, name, count, memory = min(shares)
    request = asked(least, per_node, cpus, max(node.threads for node in able))
    return Request(request.option, f"{request.reason}: {count} tasks fit on a node, and {name} has {memory}M")


def asked(memory: int, per_node: int | None, cpus: int, threads: int = 1) -> Request:
    """`memory` for each task: per node where the number of tasks on a node is known, else per processor."""
    reason = f"{memory}M for each task"
    if per_node is not None:
        return Request(f"--mem={memory * per_node}M", reason)
    whole = -(-cpus // threads) * threads  # a core is allocated with all its threads
    return Request(f"--mem-per-cpu={max(1, memory // whole)}M", reason)


def _number(text: str | None) -> int | None:
    """A number as Slurm prints it; `8000+` for several kinds of node; None: UNLIMITED or absent."""
    match = re.match(r"[0-9]+", text or "")
    return int(match[0]) or None if match else None


@dataclass(frozen=True)
class Gpus:
    """The words of a job script that request and divide GPUs. Empty texts: no GPUs."""

    option: str = ""  # of sbatch
    binding: str = ""  # of srun
    task: str = ""  # lines of shell before a task's command


def gpus(text: str, takes: Sequence[bool], per_node: int | None) -> Gpus:
    """`text`: GPUs of each task that uses some, such as 1 or a100:2. `takes`: whether each slot does, node by node."""
    if not text or not any(takes):
        return Gpus()
    match = re.fullmatch(r"((?:[A-Za-z0-9_.-]+:)?)([1-9][0-9]*)", text)
    if match is None:
        raise UsageError(f"--engine gpus={text}: the GPUs of a task are needed, such as 1 or a100:2")
    kind, each = match[1], int(match[2])
    if all(takes):
        if per_node is None:
            return Gpus(f"--gpus-per-task={text}", f"--gpu-bind=single:{each}")
        return Gpus(f"--gres=gpu:{kind}{each * per_node}", f"--gpu-bind=single:{each}")
    if per_node is None:
        raise UsageError("some tasks take no GPU: how many a node needs depends on its tasks; give --engine nodes=…")
    nodes = [list(takes[at : at + per_node]) for at in range(0, len(takes), per_node)]
    most = max(sum(node) for node in nodes)
    firsts = [str(sum(node[:seat]) * each) if node[seat] else "-" for node in nodes for seat in range(len(node))]
    return Gpus(f"--gres=gpu:{kind}{each * most}", "", _TASK.format(firsts=" ".join(firsts), node=per_node, each=each))


_TASK = """
# Each task takes its own GPUs of those that Slurm shows to its node; servers take none.
first=({firsts}); own=${{first[SLURM_NODEID * {node} + SLURM_LOCALID]}}
if [ "$own" = - ]; then export CUDA_VISIBLE_DEVICES=
elif [ -n "$CUDA_VISIBLE_DEVICES" ]; then
  shown=(${{CUDA_VISIBLE_DEVICES//,/ }}) chosen=
  for number in "${{shown[@]:own:{each}}}"; do chosen=$chosen,$number; done
  export CUDA_VISIBLE_DEVICES=${{chosen#,}}
fi
"""
