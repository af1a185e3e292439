"""A cluster that the user writes down: in lists of hosts on the command line, or in a file.

`--ps-hosts a:1 --worker-hosts b:1,c:1 --job-name worker --task-index 1`, or:

[cluster]
chief = "a:2222"                  # may be omitted: then the first worker is the chief
workers = ["b:2222", "c:2222"]
servers = ["d:2222"]
evaluator = "e"
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from paceline.config.role_names import KINDS, SINGLE, WORDS
from paceline.errors import UnknownName, UsageError
from paceline.network.cluster.description import Cluster, ClusterTask, address, numbered

KEYS = {kind if kind in SINGLE else f"{kind}s": kind for kind in KINDS}  # of [cluster]


def listed(
    worker_hosts: str = "",
    ps_hosts: str = "",
    chief_hosts: str = "",
    evaluator_hosts: str = "",
    job_name: str | None = None,
    task_index: int | None = None,
) -> Cluster:
    """The cluster of the lists."""
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
    return Cluster("lists of hosts", tuple(tasks), _chosen(tasks, job_name, task_index))


def read(path: Path, job_name: str | None = None, task_index: int | None = None) -> Cluster:
    """The cluster of a file."""
    if not path.is_file():
        raise UsageError(f"no file {path} (looked in {Path.cwd()})")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    name = str(path)
    try:
        whole = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{name} is not TOML: {error}") from None
    if unknown := [key for key in whole if key != "cluster"]:
        raise UnknownName(f"table in {name}:", unknown[0], ["cluster"])
    cluster = whole.get("cluster")
    if not isinstance(cluster, dict):
        raise UsageError(f"{name}: the table [cluster] is missing")
    if unknown := [key for key in cluster if key not in KEYS]:
        raise UnknownName(f"key of [cluster] in {name}:", unknown[0], KEYS)
    tasks: list[ClusterTask] = []
    for key, kind in KEYS.items():
        where, value = f"{name}: cluster.{key}", cluster.get(key)
        if value is not None and kind in SINGLE:
            tasks += numbered(kind, [address(value, where)])
        elif isinstance(value, list):
            tasks += numbered(kind, [address(one, f"{where}[{number}]") for number, one in enumerate(value)])
        elif value is not None:
            raise UsageError(f'{where} must be a list: ["host:port", …]')
    return Cluster(name, tuple(tasks), _chosen(tasks, job_name, task_index))


def _chosen(tasks: list[ClusterTask], job_name: str | None, task_index: int | None) -> ClusterTask | None:
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
