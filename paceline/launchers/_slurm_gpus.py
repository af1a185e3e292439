"""GPUs of a Slurm job in which only some tasks use one: requested per node, and divided among the tasks of a node.

Slurm gives every task of a step the same number. So the job requests for each node what the fullest node needs, and
each task takes its own of the GPUs that Slurm shows to its node; a server takes none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import UsageError


@dataclass(frozen=True)
class Gpus:
    """The words of a job script that request and divide GPUs. Empty texts: no GPUs."""

    option: str = ""  # of sbatch
    binding: str = ""  # of srun
    task: str = ""  # lines of shell before a task's command


def asked(text: str, takes: Sequence[bool], per_node: int | None) -> Gpus:
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
        raise UsageError(
            "this job has tasks with and without a GPU (servers and evaluators take none): how many a node needs "
            "depends on the tasks of each node: give --engine nodes=… (and tasks-per-node=…)"
        )
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
