"""What a process is in a run, and where the hub is: by PACELINE_… variables, or by what describes the cluster."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from paceline.config.build import scheme_of
from paceline.errors import UsageError
from paceline.network.cluster import tf_config
from paceline.network.cluster.assignment import Assignment, in_cluster, told
from paceline.network.cluster.description import Cluster, ClusterTask
from paceline.network.nodes import participate

CLUSTER = {"PACELINE_CLUSTER": "chief=1,worker=2,ps=1,evaluator=1"}


def test_without_variables_nothing_is_told() -> None:
    assert told({}) is None


def test_the_chief_is_told_whom_to_wait_for_and_where_to_listen() -> None:
    found = told({"PACELINE_TASK": "chief", "PACELINE_HUB": "h1:7070"} | CLUSTER)
    assert found is not None
    assert (found.roles, found.workers, found.servers, found.evaluator) == (("chief",), 3, 1, True)
    assert found.chief
    assert found.find({}) == ("h1", 7070)


@pytest.mark.parametrize(
    ("task", "roles"),
    [
        ("worker:0", ("worker:1",)),
        ("ps:0", ("server:0",)),
        ("evaluator", ("evaluator",)),
        ("worker:1, server:0", ("worker:2", "server:0")),
    ],
)
def test_workers_are_numbered_behind_the_chief(task: str, roles: tuple[str, ...]) -> None:
    found = told({"PACELINE_TASK": task, "PACELINE_HUB": "h1:7070"})
    assert found is not None
    assert found.roles == roles
    assert not found.chief


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"PACELINE_TASK": "boss", "PACELINE_HUB": "h:1"}, "no task 'boss'"),
        ({"PACELINE_TASK": "worker:x", "PACELINE_HUB": "h:1"}, "no task 'worker:x'"),
        ({"PACELINE_TASK": "chief"}, "PACELINE_CLUSTER is missing"),
        ({"PACELINE_TASK": "worker:0"}, "PACELINE_HUB"),
        ({"PACELINE_TASK": "worker:0", "PACELINE_HUB": "h:99999"}, "from 1 to 65535"),
        ({"PACELINE_TASK": "chief", "PACELINE_CLUSTER": "boss=1"}, "no kind of task"),
        ({"PACELINE_TASK": "chief", "PACELINE_CLUSTER": "worker=many"}, "KIND=NUMBER"),
        ({"PACELINE_TASKS": "chief,worker:0"}, "JOB_COMPLETION_INDEX is not set"),
        ({"PACELINE_TASKS": "chief,worker:0", "JOB_COMPLETION_INDEX": "2"}, "JOB_COMPLETION_INDEX is 2"),
    ],
)
def test_what_is_wrong_is_named(environment: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        told(environment)


def test_a_pod_is_the_task_of_its_index() -> None:
    tasks = {"PACELINE_TASKS": "chief,worker:0,server:0", "PACELINE_HUB": "job-0.job:7070"}
    found = told(tasks | {"JOB_COMPLETION_INDEX": "2"})
    assert found is not None
    assert (found.roles, found.workers, found.servers) == (("server:0",), 2, 1)


def test_the_hub_is_found_by_the_file_that_it_writes(tmp_path: Path) -> None:
    meet = tmp_path / "deeper" / "hub"
    variables = {"PACELINE_MEET": str(meet)}
    chief = told(variables | {"PACELINE_TASK": "chief"} | CLUSTER)
    worker = told(variables | {"PACELINE_TASK": "worker:0"})
    assert chief is not None
    assert worker is not None
    assert worker.find({}) is None
    chief.announce(("10.1.2.3", 4567), {}, lambda _: None)
    assert worker.find({}) == ("10.1.2.3", 4567)
    assert stat.S_IMODE(meet.stat().st_mode) == 0o600
    meet.write_text("nonsense")
    assert worker.find({}) is None
    chief.withdraw()
    assert not meet.exists()


def test_the_hub_says_where_it_is_if_it_is_asked_to() -> None:
    said: list[str] = []
    chief = told({"PACELINE_TASK": "chief", "PACELINE_HUB": "127.0.0.1:0"} | CLUSTER)
    assert chief is not None
    assert chief.listen(None, True, {}) == ("127.0.0.1", 0)
    chief.announce(("::1", 99), {"PACELINE_TELL_HUB": "1"}, said.append)
    assert said == ["hub: [::1]:99"]


def config(kind: str, index: int = 0) -> Cluster:
    cluster = {"chief": ["localhost:2222"], "worker": ["localhost:2223", "localhost:2224"], "ps": ["localhost:2225"]}
    task = {"type": kind, "index": index}
    found = tf_config.seen({"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})})
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("kind", "index", "role"),
    [("chief", 0, "chief"), ("worker", 1, "worker:2"), ("ps", 0, "server:0"), ("evaluator", 0, "evaluator")],
)
def test_tf_config_names_role_and_hub(kind: str, index: int, role: str) -> None:
    found = in_cluster(config(kind, index), {}, None)
    assert found is not None
    assert (found.roles, found.workers, found.servers) == ((role,), 3, 1)
    assert found.find({}) == ("localhost", 2222)
    assert found.listen(None, True, {}) == ("127.0.0.1", 2222)


def test_without_a_chief_the_first_worker_is_it() -> None:
    tasks = (ClusterTask("worker", 0, "a", 1), ClusterTask("worker", 1, "b", 2), ClusterTask("server", 0, "c", 3))
    found = in_cluster(Cluster("test", tasks, tasks[1]), {}, None)
    assert found is not None
    assert (found.roles, found.find({})) == (("worker:1",), ("a", 1))


def test_tasks_of_one_job_name_the_same_file_where_nothing_else_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = (ClusterTask("worker", 0, "a"), ClusterTask("worker", 1, "b"))
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    names = {in_cluster(Cluster("test", tasks, me), slurm, None).meet for me in tasks}  # type: ignore[union-attr]
    again = in_cluster(Cluster("test", tasks, tasks[0]), slurm | {"SLURM_RESTART_COUNT": "1"}, None)
    assert len(names) == 1
    assert again is not None
    assert again.meet not in names
    with pytest.raises(UsageError, match="--dir"):
        in_cluster(Cluster("test", tasks, tasks[0]), {}, None)


def test_one_process_of_an_engine_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Cluster("mpirun", (ClusterTask("worker", 0, "a", 1),), ClusterTask("worker", 0, "a", 1), by_role=False)
    monkeypatch.setattr("paceline.network.cluster.detect.seen", lambda _: alone)
    assert participate.here(None) is None


@pytest.mark.parametrize("kind", ["chief", "master", "worker"])
def test_a_cluster_of_one_named_task_has_one_worker_on_this_machine(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"cluster": {kind: ["a:1"]}, "task": {"type": kind, "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    given = participate.here(None)
    assert given is not None
    assert (given.chief, given.alone) == (True, True)
    scheme = scheme_of("async", {})
    assert participate.counted(given, {}, scheme) == {"workers": 1, "servers": 1}
    assert participate.counted(given, {"servers": 3}, scheme) == {"workers": 1, "servers": 3}
    assert participate.counted(given, {}, scheme_of("allreduce", {})) == {"workers": 1, "servers": 0}
    with pytest.raises(UsageError, match="--workers 2, but TF_CONFIG has 1"):
        participate.counted(given, {"workers": 2}, scheme)
    assert participate.hub_of(given, participate.Network(), "nowhere", print) is participate.Supervisor


def test_nobody_waits_for_the_evaluator_of_a_cluster_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"cluster": {"chief": ["a:1"]}, "task": {"type": "evaluator", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(UsageError, match="add --evaluator"):
        participate.here(None)


def test_numbers_that_contradict_the_cluster_are_refused() -> None:
    given = Assignment("TF_CONFIG", ("chief",), 3, 1, False, ("a", 1))
    scheme = scheme_of("async", {})
    assert participate.counted(given, {"workers": 3}, scheme) == {"workers": 3, "servers": 1}
    with pytest.raises(UsageError, match="--workers 2, but TF_CONFIG has 3"):
        participate.counted(given, {"workers": 2}, scheme)
    without = Assignment("TF_CONFIG", ("chief",), 3, 0, False, ("a", 1))
    with pytest.raises(UsageError, match="needs a server"):
        participate.counted(without, {}, scheme)
    assert participate.counted(without, {}, scheme_of("allreduce", {}))["servers"] == 0


def test_the_secret_is_looked_for_in_this_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("PACELINE_SECRET", raising=False)
    monkeypatch.delenv("PACELINE_SECRET_FILE", raising=False)
    mine = participate.secret_of(None)
    assert participate.secret_of(str(tmp_path)) == mine
    participate.secrets.write(tmp_path / "secret", b"r" * 32)
    assert participate.secret_of(str(tmp_path)) == b"r" * 32
    monkeypatch.setenv("PACELINE_SECRET", "ab" * 32)
    assert participate.secret_of(str(tmp_path)) == bytes.fromhex("ab" * 32)
