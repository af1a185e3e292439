"""TF_CONFIG: the shells of the distributed TensorFlow guides, and every way to get it wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.network.cluster.description import Cluster, ClusterTask
from paceline.network.cluster.tf_config import seen

# the guide's cluster on one machine: a shell for each of its tasks, and one for the evaluator
GUIDE = {
    "chief": ["localhost:2222"],
    "worker": ["localhost:2223", "localhost:2224"],
    "ps": ["localhost:2225"],
}


def read(config: Any) -> Cluster | None:
    return seen({"TF_CONFIG": config if isinstance(config, str) else json.dumps(config)})


def shell(kind: Any, index: Any, cluster: Any = GUIDE) -> Cluster:
    found = read({"cluster": cluster, "task": {"type": kind, "index": index}})
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("kind", "index", "me", "role", "rank"),
    [
        ("chief", 0, ClusterTask("chief", 0, "localhost", 2222), "chief", 0),
        ("worker", 0, ClusterTask("worker", 0, "localhost", 2223), "worker", 1),
        ("worker", 1, ClusterTask("worker", 1, "localhost", 2224), "worker", 2),
        ("ps", 0, ClusterTask("server", 0, "localhost", 2225), "server", None),
        ("evaluator", 0, ClusterTask("evaluator", 0), "evaluator", None),
    ],
)
def test_the_shells_of_the_guide(kind: str, index: int, me: ClusterTask, role: str, rank: int | None) -> None:
    cluster = shell(kind, index)
    assert cluster.me == me
    assert cluster.role(me) == role
    assert cluster.rank(me) == rank
    assert cluster.complete
    assert cluster.one_host
    assert cluster.source == "TF_CONFIG"
    assert [str(task) for task in cluster.tasks] == ["chief:0", "worker:0", "worker:1", "server:0"]


def test_workers_alone_have_worker_0_as_their_chief() -> None:
    cluster = shell("worker", 1, {"worker": ["host1:12345", "host2:23456"]})
    assert cluster.chief == ClusterTask("worker", 0, "host1", 12345)
    assert cluster.me == ClusterTask("worker", 1, "host2", 23456)


def test_master_is_an_old_name_of_the_chief() -> None:
    cluster = shell("master", 0, {"master": ["a:1"], "ps": ["b:1"]})
    assert cluster.me == cluster.chief == ClusterTask("chief", 0, "a", 1)
    assert shell("chief", 0, {"master": ["a:1"]}).me == ClusterTask("chief", 0, "a", 1)


def test_a_listed_evaluator_has_an_address() -> None:
    assert shell("evaluator", 0, GUIDE | {"evaluator": ["e:1"]}).me == ClusterTask("evaluator", 0, "e", 1)


def test_keys_of_others_and_numbers_in_quotes_are_borne() -> None:
    task = {"type": "worker", "index": "1", "cloud": "job-7", "trial": "3"}
    config = {"cluster": GUIDE, "task": task, "environment": "cloud", "rpc_layer": "grpc", "job": {"scale": 1}}
    found = read(config)
    assert found is not None
    assert found.me == ClusterTask("worker", 1, "localhost", 2224)


@pytest.mark.parametrize(
    "text",
    [
        *("", "  ", "{}", '{"cluster": {}}', '{"cluster": null}', '{"task": {}}', '{"environment": "cloud"}'),
        *('{"cluster": {}, "task": {"type": "worker", "index": 0}}', '{"customers": [1]}'),
    ],
)
def test_without_a_cluster_the_run_is_local(text: str) -> None:
    assert read(text) is None


def test_absent() -> None:
    assert seen({}) is None


FIRST = {"type": "worker", "index": 0}
TYPES = "there are: chief, master, worker, ps, evaluator"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("{", r"TF_CONFIG is not JSON: .* line 1 column 2"),
        ("{'cluster': 1}", "TF_CONFIG is not JSON"),
        ("[" * 100_000, "TF_CONFIG is not JSON"),
        ("[]", "TF_CONFIG must be a JSON object, not a list"),
        ("7", "TF_CONFIG must be a JSON object, not a number"),
        ({"cluster": ["a:1"]}, "TF_CONFIG: cluster must be an object of lists, not a list"),
        ({"cluster": []}, "TF_CONFIG: cluster must be an object of lists, not a list"),
        ({"cluster": "a:1"}, "cluster must be an object of lists, not a string"),
        ({"cluster": {"workers": ["a:1"]}}, "TF_CONFIG: cluster.workers is no type of task; did you mean 'worker'"),
        ({"cluster": {"cheif": ["a:1"]}}, "TF_CONFIG: cluster.cheif is no type of task; did you mean 'chief'"),
        ({"cluster": {"gpu": ["a:1"]}}, f"TF_CONFIG: cluster.gpu is no type of task; {TYPES}"),
        ({"clutser": GUIDE, "task": FIRST}, "TF_CONFIG: the key 'clutser' is not known; did you mean 'cluster'"),
        ({"Cluster": GUIDE, "task": FIRST}, "the key 'Cluster' is not known; did you mean 'cluster'"),
        ({"clusters": GUIDE}, "the key 'clusters' is not known; did you mean 'cluster'"),
        ({"cluster": GUIDE, "tasks": FIRST}, "the key 'tasks' is not known; did you mean 'task'"),
        ({"task": FIRST}, "TF_CONFIG: there is a task, but cluster is missing; list all tasks there"),
        ({"task": FIRST, "cluster": None}, "there is a task, but cluster is missing"),
        ({"task": {"type": "ps", "index": 0}, "cluster": {}}, "there is a task, but cluster is empty"),
        ({"task": {"type": "worker", "index": 1}, "cluster": {}}, "there is a task, but cluster is empty"),
        ({"cluster": {"worker": "a:1"}}, 'cluster.worker must be a list of "host:port", not a string'),
        ({"cluster": {"worker": {"0": "a:1"}}}, "cluster.worker must be a list .* not an object"),
        ({"cluster": {"worker": None}}, "cluster.worker must be a list .* not null"),
        ({"cluster": {"worker": ["a:1", "b:x"]}}, r"TF_CONFIG: cluster.worker\[1\]: the port of 'b:x'"),
        ({"cluster": {"worker": [["a", 1]]}}, r"TF_CONFIG: cluster.worker\[0\]: \['a', 1\] is not an address"),
        ({"cluster": {"chief": ["a:1"], "master": ["b:1"]}}, "cluster.chief and cluster.master mean the same"),
        ({"cluster": GUIDE}, "TF_CONFIG: task is missing: say which task this process is"),
        ({"cluster": GUIDE, "task": "worker"}, 'TF_CONFIG: task must be an object with "type" and "index", not a str'),
        ({"cluster": GUIDE, "task": {"index": 0}}, "TF_CONFIG: task.type is missing"),
        ({"cluster": GUIDE, "task": {}}, "TF_CONFIG: task.type is missing"),
        ({"cluster": GUIDE, "task": {"type": "worker"}}, "TF_CONFIG: task.index is missing"),
    ],
)
def test_what_is_wrong_is_named(config: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read(config)


@pytest.mark.parametrize(
    ("kind", "index", "cluster", "why"),
    [
        ("Worker", 0, GUIDE, "TF_CONFIG: task.type 'Worker' is no type of task; did you mean 'worker'"),
        ("server", 0, GUIDE, f"TF_CONFIG: task.type 'server' is no type of task; {TYPES}"),
        (7, 0, GUIDE, "task.type 7 is no type of task"),
        ("worker", 2, GUIDE, "TF_CONFIG: task.index is 2, but cluster.worker has only the indices 0 to 1"),
        ("chief", 1, GUIDE, "task.index is 1, but cluster.chief has only the indices 0 to 0"),
        ("evaluator", 1, GUIDE, "task.index is 1, but there is one evaluator, with index 0"),
        ("ps", 0, {"worker": ["a:1"]}, "task.type is 'ps', but the cluster has none; it has: worker"),
        ("worker", -1, GUIDE, "task.index must be a whole number of at least 0, not -1"),
        ("worker", 0.5, GUIDE, "task.index must be a whole number of at least 0, not 0.5"),
        ("worker", True, GUIDE, "task.index must be a whole number of at least 0, not true"),
        ("worker", "one", GUIDE, 'task.index must be a whole number of at least 0, not "one"'),
        ("ps", 0, {"ps": ["a:1"]}, "TF_CONFIG: the cluster has neither a chief nor a worker"),
        ("worker", 0, {"worker": ["a:1", "a:1"]}, "TF_CONFIG: worker:0 and worker:1 have the same address a:1"),
        ("chief", 0, {"chief": ["a:1", "b:1"]}, "TF_CONFIG: there can be one chief, not 2"),
    ],
)
def test_a_task_that_is_not_there_is_named(kind: Any, index: Any, cluster: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        shell(kind, index, cluster)
