"""A file that describes a cluster.

[cluster]
chief = "a:2222"                  # may be omitted: then the first worker is the chief
workers = ["b:2222", "c:2222"]
servers = ["d:2222"]
evaluator = "e"
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from paceline.config.role_names import KINDS, SINGLE
from paceline.errors import UnknownName, UsageError
from paceline.network.cluster.description import Cluster, ClusterTask, address, numbered
from paceline.network.cluster.host_lists import chosen

KEYS = {kind if kind in SINGLE else f"{kind}s": kind for kind in KINDS}


def read(path: Path, job_name: str | None = None, task_index: int | None = None) -> Cluster:
    """The cluster of a file."""
    if not path.is_file():
        raise UsageError(f"no file {path} (looked in {Path.cwd()})")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    return described(text, str(path), job_name, task_index)


def described(text: str, name: str, job_name: str | None = None, task_index: int | None = None) -> Cluster:
    """The cluster of a file's text."""
    try:
        whole = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{name} is not TOML: {error}") from None
    for key in whole:
        if key != "cluster":
            raise UnknownName(f"table in {name}:", key, ["cluster"])
    cluster = whole.get("cluster")
    if not isinstance(cluster, dict):
        raise UsageError(f"{name}: the table [cluster] is missing")
    for key in cluster:
        if key not in KEYS:
            raise UnknownName(f"key of [cluster] in {name}:", key, KEYS)
    tasks: list[ClusterTask] = []
    for key, kind in KEYS.items():
        if key in cluster:
            tasks += numbered(kind, _addresses(cluster[key], key, f"{name}: cluster.{key}"))
    return Cluster(name, tuple(tasks), chosen(tasks, job_name, task_index))


def _addresses(value: Any, key: str, where: str) -> list[tuple[str, int | None]]:
    if key in SINGLE:
        return [address(value, where)]
    if not isinstance(value, list):
        raise UsageError(f'{where} must be a list: ["host:port", …]')
    return [address(one, f"{where}[{number}]") for number, one in enumerate(value)]
