"""The variable TF_CONFIG, as distributed TensorFlow reads it.

    {"cluster": {"chief": ["a:2222"], "worker": ["b:2222"], "ps": ["c:2222"]}, "task": {"type": "worker", "index": 0}}

`master` is an old name of the chief. The evaluator is a task that the cluster need not list. Other keys (`environment`,
`rpc_layer`, `job`, …) are not read, unless one of them looks like a misspelt `cluster` or `task`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from paceline.config.role_names import TF_WORDS, TRAINING
from paceline.errors import UsageError
from paceline.network.cluster.description import Cluster, ClusterTask, address, numbered

NAME = "TF_CONFIG"
# further keys that TensorFlow, its estimators and its job controllers set
OTHERS = ("environment", "rpc_layer", "job", "master", "eval_session_master", "session_master", "service", "model_dir")


def seen(environment: Mapping[str, str]) -> Cluster | None:
    """The cluster that TF_CONFIG describes; None: it is absent or names no cluster, so the run is local."""
    text = environment.get(NAME, "")
    if not text.strip():
        return None
    try:
        config = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"{NAME} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{NAME} must be a JSON object, not {_kind(config)}")
    _refuse_misspelt(config)
    cluster = config.get("cluster")
    if not cluster and cluster in (None, {}):
        _refuse_alone(config)
        return None
    tasks = _tasks(cluster)
    return Cluster(NAME, tuple(tasks), _me(config.get("task"), cluster, tasks))


def _refuse_misspelt(config: dict[str, Any]) -> None:
    """Refuse a key that is almost `cluster`, or almost `task` besides a cluster."""
    if "cluster" in config and "task" in config:
        return
    missing = "task" if "cluster" in config else "cluster"
    unknown = {key.lower(): key for key in config if key not in ("cluster", "task", *OTHERS)}
    near = difflib.get_close_matches(missing, unknown, n=1, cutoff=0.7)
    if near and isinstance(config[unknown[near[0]]], dict):
        raise UsageError(f"{NAME}: the key {unknown[near[0]]!r} is not known; did you mean {missing!r}?")


def _refuse_alone(config: dict[str, Any]) -> None:
    """Refuse a task without a cluster: it implies other tasks. An empty cluster with the first task that trains is a
    local run."""
    task = config.get("task")
    first = isinstance(task, dict) and task.get("type") in TRAINING and task.get("index", 0) in (0, "0")
    if task and not (first and config.get("cluster") == {}):
        state = "empty" if config.get("cluster") == {} else "missing"
        raise UsageError(
            f"{NAME}: there is a task, but cluster is {state}; list all tasks there: "
            '"cluster": {"chief": ["host:port"], "worker": ["host:port"], "ps": ["host:port"]}. For a local run unset '
            f"{NAME}"
        )


def _tasks(cluster: Any) -> list[ClusterTask]:
    if not isinstance(cluster, dict):
        raise UsageError(f"{NAME}: cluster must be an object of lists, not {_kind(cluster)}")
    if "chief" in cluster and "master" in cluster:
        raise UsageError(f"{NAME}: cluster.chief and cluster.master mean the same; give one of them")
    found: list[ClusterTask] = []
    for key, entries in cluster.items():
        if key not in TF_WORDS:
            raise UsageError(f"{NAME}: cluster.{key} is no type of task; {_meant(key)}")
        if not isinstance(entries, list):
            raise UsageError(f'{NAME}: cluster.{key} must be a list of "host:port", not {_kind(entries)}')
        found += numbered(TF_WORDS[key], [address(one, f"{NAME}: cluster.{key}[{n}]") for n, one in enumerate(entries)])
    return found


def _me(task: Any, cluster: dict[str, list[str]], tasks: list[ClusterTask]) -> ClusterTask:
    if task is None:
        raise UsageError(f'{NAME}: task is missing: say which task this process is, as {{"type": …, "index": …}}')
    if not isinstance(task, dict):
        raise UsageError(f'{NAME}: task must be an object with "type" and "index", not {_kind(task)}')
    for key in ("type", "index"):
        if task.get(key) is None:
            raise UsageError(f"{NAME}: task.{key} is missing")
    kind, index = task["type"], _index(task["index"])
    if not isinstance(kind, str) or kind not in TF_WORDS:
        raise UsageError(f"{NAME}: task.type {kind!r} is no type of task; {_meant(kind)}")
    own = [one for one in tasks if one.kind == TF_WORDS[kind]]
    if not own and kind == "evaluator":
        if index:
            raise UsageError(f"{NAME}: task.index is {index}, but there is one evaluator, with index 0")
        return ClusterTask("evaluator", 0)
    if not own:
        raise UsageError(f"{NAME}: task.type is {kind!r}, but the cluster has none; it has: {', '.join(cluster)}")
    if index >= len(own):
        last = len(own) - 1
        raise UsageError(f"{NAME}: task.index is {index}, but cluster.{kind} has only the indices 0 to {last}")
    return own[index]


def _index(value: Any) -> int:
    """The index of a task. Shell scripts often write the number as a string."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UsageError(f"{NAME}: task.index must be a whole number of at least 0, not {json.dumps(value)}")
    return value


def _meant(word: Any) -> str:
    """A suggestion: the type of task that is closest to a word, or all types."""
    near = difflib.get_close_matches(str(word).lower(), TF_WORDS, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(TF_WORDS)}"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
