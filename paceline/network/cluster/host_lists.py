"""Lists of hosts on the command line: `--ps-hosts a:1 --worker-hosts b:1,c:1 --job-name worker --task-index 1`."""

from __future__ import annotations

from paceline.config.role_names import SINGLE, WORDS
from paceline.errors import UnknownName, UsageError
from paceline.network.cluster.description import Cluster, ClusterTask, address, numbered


def listed(
    worker_hosts: str = "",
    ps_hosts: str = "",
    chief_hosts: str = "",
    evaluator_hosts: str = "",
    job_name: str | None = None,
    task_index: int | None = None,
) -> Cluster:
    """The cluster that the lists describe."""
    given = {
        "--chief-hosts": ("chief", chief_hosts),
        "--worker-hosts": ("worker", worker_hosts),
        "--ps-hosts": ("server", ps_hosts),
        "--evaluator-hosts": ("evaluator", evaluator_hosts),
    }
    if not worker_hosts.strip() and not chief_hosts.strip():
        raise UsageError("--worker-hosts is missing: a cluster needs a worker")
    tasks: list[ClusterTask] = []
    for option, (kind, text) in given.items():
        tasks += numbered(kind, [address(word.strip(), option) for word in text.split(",")] if text.strip() else [])
    return Cluster("lists of hosts", tuple(tasks), chosen(tasks, job_name, task_index))


def chosen(tasks: list[ClusterTask], job_name: str | None, task_index: int | None) -> ClusterTask | None:
    """The task of `--job-name` and `--task-index`; None: neither is given."""
    if job_name is None and task_index is None:
        return None
    if job_name is None:
        raise UsageError(f"--task-index {task_index} is given without --job-name")
    if job_name not in WORDS:
        raise UnknownName("job name", job_name, WORDS)
    kind = WORDS[job_name]
    own = [task for task in tasks if task.kind == kind]
    if task_index is None:
        if len(own) > 1 or kind not in SINGLE:
            raise UsageError(f"--job-name {job_name} is given without --task-index")
        task_index = 0  # there is one chief and one evaluator
    if not own and kind == "evaluator" and task_index == 0:
        return ClusterTask("evaluator", 0)  # it needs no address
    if not 0 <= task_index < len(own):
        there = f"only the indices 0 to {len(own) - 1}" if own else "none"
        raise UsageError(f"--task-index is {task_index}, but of job {job_name} there are {there}")
    return own[task_index]
