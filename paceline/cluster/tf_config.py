"""The variable TF_CONFIG, as distributed TensorFlow reads it.

    {"cluster": {"chief": ["a:2222"], "worker": ["b:2222"], "ps": ["c:2222"]}, "task": {"type": "worker", "index": 0}}

`master` is an old name of the chief. The evaluator is a task that the cluster need not list. Other keys (`environment`,
`rpc_layer`, `job`, …) are somebody else's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.cluster.description import Cluster, Task, address, numbered
from paceline.errors import UsageError

NAME = "TF_CONFIG"
TYPES = {"chief": "chief", "master": "chief", "worker": "worker", "ps": "server", "evaluator": "evaluator"}


def seen(environment: Mapping[str, str]) -> Cluster | None:
    """The cluster that TF_CONFIG describes; None where it is absent or names no cluster: then the run is local."""
    text = environment.get(NAME, "")
    if not text.strip():
        return None
    try:
        config = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"{NAME} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{NAME} must be a JSON object, not {_kind(config)}")
    cluster = config.get("cluster")
    if not cluster and cluster in (None, {}):
        return None
    tasks = _tasks(cluster)
    return Cluster(NAME, tuple(tasks), _me(config.get("task"), cluster, tasks))


def _tasks(cluster: Any) -> list[Task]:
    if not isinstance(cluster, dict):
        raise UsageError(f"{NAME}: cluster must be an object of lists, not {_kind(cluster)}")
    if "chief" in cluster and "master" in cluster:
        raise UsageError(f"{NAME}: cluster.chief and cluster.master mean the same; give one of them")
    found: list[Task] = []
    for key, entries in cluster.items():
        if key not in TYPES:
            raise UsageError(f"{NAME}: cluster.{key} is no type of task; there are: {', '.join(TYPES)}")
        if not isinstance(entries, list):
            raise UsageError(f'{NAME}: cluster.{key} must be a list of "host:port", not {_kind(entries)}')
        found += numbered(TYPES[key], [address(one, f"{NAME}: cluster.{key}[{n}]") for n, one in enumerate(entries)])
    return found


def _me(task: Any, cluster: dict[str, list[str]], tasks: list[Task]) -> Task:
    if task is None:
        raise UsageError(f'{NAME}: task is missing: say which task this process is, as {{"type": …, "index": …}}')
    if not isinstance(task, dict):
        raise UsageError(f'{NAME}: task must be an object with "type" and "index", not {_kind(task)}')
    for key in ("type", "index"):
        if task.get(key) is None:
            raise UsageError(f"{NAME}: task.{key} is missing")
    kind, index = task["type"], _index(task["index"])
    if not isinstance(kind, str) or kind not in TYPES:
        raise UsageError(f"{NAME}: task.type {kind!r} is no type of task; there are: {', '.join(TYPES)}")
    own = [one for one in tasks if one.kind == TYPES[kind]]
    if not own and kind == "evaluator":
        if index:
            raise UsageError(f"{NAME}: task.index is {index}, but there is one evaluator, with index 0")
        return Task("evaluator", 0)
    if not own:
        raise UsageError(f"{NAME}: task.type is {kind!r}, but the cluster has none; it has: {', '.join(cluster)}")
    if index >= len(own):
        last = len(own) - 1
        raise UsageError(f"{NAME}: task.index is {index}, but cluster.{kind} has only the indices 0 to {last}")
    return own[index]


def _index(value: Any) -> int:
    """Scripts that put it together in a shell often write the number as a string."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UsageError(f"{NAME}: task.index must be a whole number of at least 0, not {json.dumps(value)}")
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
